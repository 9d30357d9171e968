"""The command line as a process of its own, against a real server."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from libdsec import DSecClient
from tests.integration.libdsec.conftest import FAKE, until
from tests.integration.libdsec.peer import KEY, PROJECT, Peer

pytestmark = pytest.mark.integration

REPOSITORY = Path(__file__).parents[3]
LIMIT_S = 120


@dataclass
class Done:
    code: int
    out: str
    err: str


class Cli:
    def __init__(self, peer: Peer) -> None:
        self.env = {
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            "DSEC_URL": peer.url,
            "DSEC_API_KEY": KEY,
            "DSEC_PROJECT": PROJECT,
        }

    async def start(self, *argv: str, stdin: int | None = asyncio.subprocess.DEVNULL):
        pipe = asyncio.subprocess.PIPE
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", "libdsec", *argv,
            stdin=stdin, stdout=pipe, stderr=pipe, env=self.env,
        )  # fmt: skip

    async def __call__(self, *argv: str, stdin: bytes | None = None) -> Done:
        how = asyncio.subprocess.DEVNULL if stdin is None else asyncio.subprocess.PIPE
        process = await self.start(*argv, stdin=how)
        out, err = await asyncio.wait_for(process.communicate(stdin), LIMIT_S)
        return Done(process.returncode or 0, out.decode(), err.decode())


@pytest.fixture
def dsec(peer: Peer) -> Cli:
    return Cli(peer)


@pytest.fixture
async def id(client: DSecClient) -> str:
    return (await client.create(FAKE)).id


async def test_run_ends_with_its_command_and_leaves_nothing(peer: Peer, dsec: Cli):
    done = await dsec("run", "--backend", "fake", "-", "sh", "-c", "echo out; echo err >&2; exit 3")
    assert (done.code, done.out, done.err) == (3, "out\n", "err\n")
    assert peer.live() == []


async def test_run_without_a_command_stays(peer: Peer, dsec: Cli):
    done = await dsec("run", "--backend", "fake", "--label", "a=b", "-", "--json")
    assert done.code == 2, "options end at the image"
    done = await dsec("run", "--backend", "fake", "--label", "a=b", "--json", "-")
    made = json.loads(done.out)
    assert [made["id"]] == [f"n1-{uid}" for uid in peer.live()]
    listed = json.loads((await dsec("ps", "--label", "a=b", "--json")).out)
    assert listed[0]["id"] == made["id"]
    stopped = await dsec("rm", made["id"])
    assert stopped.code == 0
    assert peer.live() == []
    assert (await dsec("ps")).out.splitlines() == ["ID\tSTATE\tTIME_UP\tNODE\tJOB\tLABELS"]


async def test_run_names_a_policy_or_brings_a_document(peer: Peer, dsec: Cli, tmp_path: Path):
    fake = ("run", "--backend", "fake", "--job", "night")
    assert (await dsec(*fake, "--policy", "locked", "-", "true")).code == 0
    document = tmp_path / "policy.json"
    document.write_text('{"network": {"pypi": true}}')
    assert (await dsec(*fake, "--policy", f"@{document}", "-", "true")).code == 0
    missing = await dsec(*fake, "--policy", f"@{document}.none", "-", "true")
    assert missing.code == 125
    assert "field document" in missing.err
    named, brought = (json.loads(body)["specs"][0] for body in peer.specs_of.values())
    assert (named["policy_name"], named["job"]) == ("locked", "night")
    assert brought["policy"] == {"network": {"pypi": True}}


async def test_exec_exit_codes(dsec: Cli, id: str):
    assert (await dsec("exec", id, "exit 7")).code == 7
    late = await dsec("exec", "--timeout", "1.5", id, "echo partial; sleep 60")
    assert (late.code, late.out) == (124, "partial\n")
    missing = await dsec("exec", "n1-01k0000000000000000000none"[:29], "true")
    assert missing.code == 125
    assert missing.err.startswith("dsec: ")
    nonsense = await dsec("exec", "--json", "what", "true")
    assert nonsense.code == 125
    assert json.loads(nonsense.err)["error"]["field"] == "id"


async def test_options_after_the_command_are_the_commands(dsec: Cli, id: str):
    done = await dsec("exec", id, "--", "printf", "%s ", "--json", "-i", "--timeout")
    assert done.out == "--json -i --timeout "


async def test_exec_passes_input_and_bytes(dsec: Cli, id: str):
    done = await dsec("exec", "-i", id, "wc -c", stdin=b"x" * 300_000)
    assert done.out.strip() == "300000"
    as_json = json.loads((await dsec("exec", "--json", id, "echo a; exit 2")).out)
    assert (as_json["exit_code"], as_json["stdout"]) == (2, "a\n")


async def test_exec_ends_with_the_command_whatever_its_input_does(dsec: Cli, id: str):
    """(E34)"""
    process = await dsec.start("exec", "-i", id, "--", "echo", "hi", stdin=asyncio.subprocess.PIPE)
    out = await asyncio.wait_for(process.stdout.read(), LIMIT_S)
    code = await asyncio.wait_for(process.wait(), LIMIT_S)
    assert (out, code) == (b"hi\n", 0)
    process.stdin.close()


async def test_an_interrupt_ends_the_command_too(peer: Peer, dsec: Cli, id: str):
    mark = peer.door.root / "mark"
    process = await dsec.start("exec", id, f"echo up; sleep 200; touch {mark}")
    assert await process.stdout.readline() == b"up\n"
    process.send_signal(2)
    assert await asyncio.wait_for(process.wait(), LIMIT_S) == 130
    await until(lambda: not peer.door.running())
    assert not mark.exists()


async def test_the_shell_runs_lines(dsec: Cli, id: str):
    done = await dsec("shell", id, stdin=b"echo one\nexit 3\necho two >&2\n")
    assert (done.out, done.err) == ("one\n", "two\n")


async def test_files_are_copied_and_listed(dsec: Cli, id: str, tmp_path: Path):
    local = tmp_path / "a.txt"
    local.write_text("content\n")
    facts = json.loads((await dsec("cp", str(local), f"{id}:/t/", "--json")).out)
    assert facts["bytes"] == 8
    assert "/t/a.txt" in (await dsec("ls", f"{id}:/t")).out
    assert (await dsec("cp", f"{id}:/t/a.txt", str(tmp_path / "back"))).code == 0
    assert (tmp_path / "back").read_text() == "content\n"
    missing = await dsec("cp", f"{id}:/nope", str(tmp_path))
    assert (missing.code, "/nope" in missing.err) == (125, True)
    assert (await dsec("cp", "a", "b")).code == 125


async def test_facts_and_use(dsec: Cli, id: str):
    assert json.loads((await dsec("info", "--json", id)).out)["state"] == "running"
    lines = [line.split("\t") for line in (await dsec("info", id)).out.splitlines()]
    shown = {line[0]: line[1] for line in lines}
    assert shown["state"] == "running"
    assert shown["created_at"].startswith("20")
    rows = json.loads((await dsec("top", "--once", "--json")).out)
    assert [row["id"] for row in rows] == [id]
    assert (await dsec("pause", id)).code == 0
    assert (await dsec("resume", id)).code == 0


async def test_colours_only_on_a_terminal(dsec: Cli, id: str):
    assert "\x1b" not in (await dsec("ps")).out
    master, slave = pty.openpty()
    dsec.env |= {"TERM": "xterm-256color"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "libdsec", "ps", stdin=slave, stdout=slave, stderr=slave,
        env=dsec.env,
    )  # fmt: skip
    await asyncio.wait_for(process.wait(), LIMIT_S)
    os.close(slave)
    assert b"\x1b[1m" in os.read(master, 65536)
    os.close(master)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
async def test_completion_scripts(dsec: Cli, shell: str):
    dsec.env |= {"_DSEC_COMPLETE": f"source_{shell}"}
    program = "import sys; sys.argv[0] = 'dsec'; from libdsec.cli import main; main()"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program,
        stdout=asyncio.subprocess.PIPE, env=dsec.env,
    )  # fmt: skip
    out, _ = await asyncio.wait_for(process.communicate(), LIMIT_S)
    assert b"dsec" in out
    assert process.returncode == 0


async def test_no_key_is_said_in_words(dsec: Cli, tmp_path: Path):
    del dsec.env["DSEC_API_KEY"]
    dsec.env["DSEC_CONFIG"] = str(tmp_path / "none.toml")
    done = await dsec("ps")
    assert done.code == 125
    assert "DSEC_API_KEY" in done.err
    assert "Traceback" not in done.err


async def test_options_that_come_too_late_are_told_from_a_command(dsec: Cli) -> None:
    for words in (("run", "-", "--user", "a"), ("exec", "sandbox", "-u", "a", "true")):
        late = await dsec(*words)
        assert late.code == 2
        assert "options come before" in late.err
    bare = await dsec("exec", "sandbox")
    assert (bare.code, "a command is missing" in bare.err) == (2, True)
