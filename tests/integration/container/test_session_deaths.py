"""Every way in which a session's shell can end: it is noticed, the command gets its code,
the next one a fresh shell, and nothing is left."""

from __future__ import annotations

import asyncio

import pytest

from tests.conformance.harness import HANG_S, new_uid, run
from tests.integration.container.harness import ContainerHarness
from tests.integration.container.test_sessions import Session, session

__all__ = ["session"]

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.docker]

ENDS = {
    "killed by itself": ("echo out; kill -9 $$; echo not", 137),
    "killed by a child": ("echo out; (kill -9 $$); sleep 5; echo not", 137),
    "killed by a signal": ("echo out; kill -TERM $$; sleep 5; echo not", 143),
    "another program in its place": ("echo out; exec sh -c 'exit 6'", 6),
    "a program in its place that dies": ("echo out; exec sh -c 'kill -9 $$'", 137),
    "an end inside a function": ("f() { echo out; exit 8; }; f; echo not", 8),
    "an end inside a loop": ("for i in 1 2; do echo out; exit 9; done", 9),
    "an end by set -e": ("set -e; echo out; false; echo not", 1),
    "an end in a trap": ("trap 'echo out; exit 4' EXIT; exit 3", 4),
    "the end of a background shell's parent": ("echo out; sleep 300 & exit 5", 5),
}


@pytest.mark.parametrize("how", ENDS)
async def test_a_shell_that_ends_is_noticed_at_once(session: Session, how: str) -> None:
    """(E11)"""
    command, code = ENDS[how]
    ran = await session(command)
    assert (ran.stdout, ran.code) == (b"out\n", code)
    assert ran.outcome.session_ended and not ran.outcome.timed_out
    ran = await session("echo fresh")
    assert (ran.stdout, ran.outcome.session_fresh) == (b"fresh\n", True)


QUIRKS = {
    "output closed": "exec 1>&- 2>&-",
    "output into nothing": "exec >/dev/null 2>&1",
    "input closed": "exec 0<&-",
    "a name of its own for its descriptors": "exec 7>&- 8>&-",
    "a trap on every signal": "trap 'echo caught' 1 2 3 15",
    "ignored signals": "trap '' 1 2 3 15",
    "a command that reads": "read x; echo got$x; cat",
    "functions over what the shell itself uses": "read() { :; }; echo() { :; }; eval() { :; }",
    "no variables to split by": "IFS=; REPLY=x",
    "a loop left early": "while :; do break 2; done",
}


@pytest.mark.parametrize("quirk", QUIRKS)
async def test_whatever_a_command_does_to_its_shell_the_next_gets_its_turn(
    session: Session, quirk: str
) -> None:
    """The shell may live on or end: a command after it runs, and its code is its own."""
    first = await session(QUIRKS[quirk])
    assert not first.outcome.timed_out
    second = await session("printf 'here\\n' >/tmp/said; (exit 3)")
    assert (second.code, second.outcome.timed_out) == (3, False)
    assert (await run(session.driver, session.handle, "cat /tmp/said")).stdout == b"here\n"
    await session("exit 0")
    assert (await session("echo end")).stdout == b"end\n"


async def test_commands_that_wait_get_the_fresh_shell(session: Session) -> None:
    """(E11)"""
    first = asyncio.ensure_future(session("sleep 0.2; kill -9 $$"))
    await asyncio.sleep(0.05)
    rest = await asyncio.gather(*(session(f"echo {i}") for i in range(5)))
    assert (await first).code == 137
    assert [r.stdout for r in rest] == [b"%d\n" % i for i in range(5)]
    assert [r.outcome.session_fresh for r in rest] == [True, False, False, False, False]


async def test_a_shell_killed_between_commands_is_replaced(session: Session) -> None:
    """(E11)"""
    pid = (await session("echo $$")).stdout.decode().strip()
    await run(session.driver, session.handle, f"kill -9 {pid}")
    ran = await session("echo again")
    assert ran.stdout == b"again\n" or ran.outcome.session_ended  # it may still have been dying
    assert (await session("echo more")).stdout == b"more\n"


async def test_thousands_of_orphans_are_reaped(harness: ContainerHarness) -> None:
    """(E28) Of commands and of a session. All have room until their reaper gets its turn."""
    sandbox = await harness.driver.start(harness.spec(uid=new_uid(), pids=4000))
    orphans = "i=0; while [ $i -lt 1500 ]; do (: &); i=$((i+1)); done"
    assert (await run(harness.driver, sandbox, orphans)).code == 0
    assert (await run(harness.driver, sandbox, orphans, session="s")).code == 0
    zombies = "cat /proc/[0-9]*/stat 2>/dev/null | grep -c ') Z '"
    async with asyncio.timeout(HANG_S):
        while (await run(harness.driver, sandbox, zombies)).stdout.strip() != b"0":
            await asyncio.sleep(0.05)
    await harness.driver.stop(sandbox)
