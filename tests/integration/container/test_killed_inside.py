"""Root of a sandbox kills all it sees: the launcher, nests and the processes that wait
for the next command. No later command is ever reported as killed by that."""

from __future__ import annotations

import asyncio

import pytest

from services.edge.drivers.base import Handle
from services.edge.drivers.container import ContainerDriver
from tests.conformance.harness import HANG_S, Recorder, run

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.docker]

ROUNDS = 200


@pytest.mark.parametrize("signal", ["KILL", "TERM"])
async def test_a_command_after_everything_was_killed_runs(
    driver: ContainerDriver, sandbox: Handle, signal: str
) -> None:
    """At once after it, when some of what was killed is not dead yet, or not reaped."""
    await run(driver, sandbox, "while :; do sleep 0.01; done & while :; do sleep 60; done &")
    for n in range(ROUNDS):
        killed = await run(driver, sandbox, f"kill -{signal} -1; exit 3", timeout_s=HANG_S)
        ran = await run(driver, sandbox, ["echo", str(n)], timeout_s=HANG_S)
        assert (killed.code, ran.code, ran.stdout) == (3, 0, b"%d\n" % n), (n, ran)


async def test_all_commands_at_once_run_after_everything_was_killed(
    driver: ContainerDriver, sandbox: Handle
) -> None:
    """Also those with input, those of a session and file operations, and more at once
    than places are kept ready for; each of them once."""
    for n in range(ROUNDS // 10):
        await run(driver, sandbox, "kill -9 -1; exit 0", timeout_s=HANG_S)
        io = Recorder(stdin=[b"a" * 100_000, b"b" * 100_000])
        fed, said, *ran = await asyncio.gather(
            run(driver, sandbox, "wc -c", io=io, stdin=True, timeout_s=HANG_S),
            run(driver, sandbox, "echo said", session=f"s{n}", timeout_s=HANG_S),
            *(run(driver, sandbox, f"echo {n} >>/tmp/ran{k}", timeout_s=HANG_S) for k in range(8)),
        )
        assert (fed.code, fed.stdout, said.code, said.stdout) == (0, b"200000\n", 0, b"said\n")
        assert [r.code for r in ran] == [0] * 8, ran
        assert (await driver.stat(sandbox, "/tmp/ran0", user=None)).type == "file"
        await run(driver, sandbox, "exit 0", session=f"s{n}")
    counts = await run(driver, sandbox, "cat /tmp/ran* | wc -l")
    assert int(counts.stdout) == 8 * (ROUNDS // 10)


async def test_an_idle_session_whose_shell_was_killed_begins_anew(
    driver: ContainerDriver, sandbox: Handle
) -> None:
    for _ in range(ROUNDS // 10):
        await run(driver, sandbox, "X=1", session="s", timeout_s=HANG_S)
        await run(driver, sandbox, "kill -9 -1; exit 0", timeout_s=HANG_S)
        ran = await run(driver, sandbox, "echo $X.", session="s", timeout_s=HANG_S)
        assert (ran.code, ran.stdout, ran.outcome.session_fresh) == (0, b".\n", True)


async def test_what_ran_when_everything_was_killed_is_reported_as_killed(
    driver: ContainerDriver, sandbox: Handle
) -> None:
    io = Recorder()
    task = asyncio.ensure_future(run(driver, sandbox, "echo on; sleep 60", io=io))
    await io.started.wait()
    await run(driver, sandbox, "kill -9 -1; exit 0", timeout_s=HANG_S)
    ran = await asyncio.wait_for(task, HANG_S)
    assert (ran.code, ran.outcome.signal, ran.stdout) == (137, "KILL", b"on\n")
