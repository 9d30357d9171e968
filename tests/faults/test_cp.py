"""``dsec cp`` and ``dsec ls`` as processes of their own, on a real container."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from libdsec import Sandbox
from tests.faults.conftest import World

pytestmark = [pytest.mark.docker]

REPOSITORY = Path(__file__).parents[2]
LIMIT_S = 60


@dataclass
class Done:
    code: int
    out: bytes
    err: str


class Dsec:
    """The command line."""

    def __init__(self, world: World) -> None:
        system = world.system
        self.env = {
            **os.environ, "PYTHONPATH": str(REPOSITORY), "DSEC_URL": system.url,
            "DSEC_API_KEY": system.admin_key, "DSEC_PROJECT": system.project,
        }  # fmt: skip

    async def __call__(self, *argv: object, stdin: bytes = b"", err: int | None = None) -> Done:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "libdsec", *map(str, argv),
            stdin=pipe, stdout=pipe, stderr=pipe if err is None else err, env=self.env,
        )  # fmt: skip
        out, said = await asyncio.wait_for(process.communicate(stdin), LIMIT_S)
        return Done(process.returncode or 0, out, (said or b"").decode())


@pytest.fixture
def dsec(world: World) -> Dsec:
    return Dsec(world)


async def test_cp_copies_files_directories_and_pipes_both_ways(
    dsec: Dsec, box: Sandbox, tmp_path: Path
) -> None:
    data = os.urandom(1 << 20) + b"\r\n\xff"
    tree = tmp_path / "tree"
    (tree / "sub/skipped").mkdir(parents=True)
    (tree / "sub/a.txt").write_text("content\n")
    (tree / "sub/skipped/b").write_text("x")
    piped, up = await asyncio.gather(
        dsec("cp", "-", f"{box.id}:/cp/piped", stdin=data),
        dsec("cp", tree, f"{box.id}:/cp/tree", "-x", "skipped", "--json"),
    )
    assert (piped.code, piped.out, piped.err) == (0, b"", "")
    assert json.loads(up.out)["bytes"] == 8
    await box.exec("ln -s / /cp/tree/away")
    back, listed, refused, down = await asyncio.gather(
        dsec("cp", f"{box.id}:/cp/piped", "-"),
        dsec("ls", "-R", f"{box.id}:/cp"),
        dsec("cp", f"{box.id}:/cp/tree", tmp_path / "none"),
        dsec("cp", f"{box.id}:/cp/tree", tmp_path / "back", "--outside-links", "skip"),
    )
    assert (back.code, back.out, back.err) == (0, data, "")
    assert b"/cp/tree/sub/a.txt" in listed.out and b"skipped" not in listed.out
    assert refused.code == 125 and "/cp/tree/away" in refused.err
    assert not (tmp_path / "none").exists()
    assert (down.code, "away" in down.err) == (0, True)
    assert [p.name for p in (tmp_path / "back").rglob("*") if p.is_file()] == ["a.txt"]
    missing = await dsec("cp", f"{box.id}:/nope", "-")
    assert (missing.code, missing.out, "/nope" in missing.err) == (125, b"", True)


async def test_cp_shows_progress_on_a_terminal_alone(
    dsec: Dsec, box: Sandbox, tmp_path: Path
) -> None:
    big = tmp_path / "big"
    big.write_bytes(os.urandom(8 << 20))
    ours, theirs = pty.openpty()
    seen, quiet = await asyncio.gather(
        dsec("cp", big, f"{box.id}:/cp/big", err=theirs),
        dsec("cp", big, f"{box.id}:/cp/quiet"),
    )
    os.close(theirs)
    shown = await asyncio.to_thread(os.read, ours, 1 << 16)
    os.close(ours)
    assert (seen.code, quiet.code, quiet.err) == (0, 0, "")
    assert b"MB" in shown and b"\x1b[" in shown
