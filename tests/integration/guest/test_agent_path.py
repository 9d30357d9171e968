"""Where a program is looked for: as execvp does it, in the command's own PATH."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.edge.agent.client import AgentClient
from services.edge.agent.commands import run_command
from services.edge.agent.handshake import CgroupFds
from services.edge.drivers.base import ExecSpec
from tests.conformance.harness import Recorder
from tests.integration.guest.test_agent import DEFAULTS, agent

__all__ = ["agent"]

PROGRAM = "dsec-test-program"


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    """``a`` and ``b`` hold the program, ``none`` nothing, ``closed`` one that may not be
    executed, ``broken`` one whose interpreter is missing; ``file`` is no folder."""
    made = {name: tmp_path / name for name in ("none", "a", "b", "closed", "broken")}
    for name, folder in made.items():
        folder.mkdir()
        if name != "none":
            program = folder / PROGRAM
            head = "/none/sh" if name == "broken" else "/bin/sh"
            program.write_text(f'#!{head}\necho "{name} $1 $PATH"\n')
            program.chmod(0o644 if name == "closed" else 0o755)
    made["file"] = tmp_path / "file"
    made["file"].write_text("")
    return made


async def run(
    agent: Path, path: str, *, cwd: str | None = None, program: str = PROGRAM
) -> tuple[int | None, str, str]:
    client = await AgentClient.connect(agent, cgroups=CgroupFds())
    try:
        io = Recorder()
        spec = ExecSpec("k", argv=[program, "x"], env={"PATH": path}, cwd=cwd)
        outcome = await run_command(client, spec, io, defaults=DEFAULTS)
        return outcome.exit_code, io.stdout.decode(), io.stderr.decode()
    finally:
        client.close()


@pytest.mark.parametrize(
    ("order", "found"),
    [
        ("a", "a"), ("none:a:b", "a"), ("none:none:b:a", "b"), ("file:a", "a"),
        ("none:file:none:b", "b"), ("closed:a", "a"), ("none:closed:none:b", "b"),
        ("broken:a", "a"), ("none:broken:closed:b", "b"), ("missing:a", "a"),
    ],
)  # fmt: skip
async def test_the_first_that_can_be_executed_runs(
    agent: Path, folders: dict[str, Path], tmp_path: Path, order: str, found: str
) -> None:
    path = ":".join(str(folders.get(name, tmp_path / name)) for name in order.split(":"))
    assert await run(agent, path) == (0, f"{found} x {path}\n", "")


@pytest.mark.parametrize(
    ("order", "code", "why"),
    [
        ("none", 127, "not found"), ("missing", 127, "not found"),
        ("none:file", 127, "Not a directory"),
        ("closed", 126, "Permission denied"), ("none:closed:none", 126, "Permission denied"),
    ],
)  # fmt: skip
async def test_why_none_runs(
    agent: Path, folders: dict[str, Path], tmp_path: Path, order: str, code: int, why: str
) -> None:
    path = ":".join(str(folders.get(name, tmp_path / name)) for name in order.split(":"))
    got, out, err = await run(agent, path)
    assert (got, out) == (code, "")
    assert err == f"sh: {PROGRAM}: {why}\n"


async def test_an_empty_element_is_the_working_directory(
    agent: Path, folders: dict[str, Path]
) -> None:
    for path in ("", ":", f"{folders['none']}::", f"{folders['none']}:"):
        code, out, _ = await run(agent, path, cwd=str(folders["b"]))
        assert (code, out) == (0, f"b x {path}\n")


async def test_elements_that_are_too_long_and_names_with_a_slash(
    agent: Path, folders: dict[str, Path]
) -> None:
    long = "/" + "x" * 5000
    path = f"{folders['none']}:{long}:{folders['a']}"
    assert await run(agent, path) == (0, f"a x {path}\n", "")
    direct = str(folders["b"] / PROGRAM)
    assert await run(agent, "/none", program=direct) == (0, "b x /none\n", "")
    below = await run(agent, "/none", program=f"./{PROGRAM}", cwd=str(folders["a"]))
    assert below == (0, "a x /none\n", "")
