"""Commands, as the port's prose promises them."""

from __future__ import annotations

import asyncio

import pytest

from services.edge.drivers.base import Driver, Handle
from shared.errors import DsecError, InvalidRequest
from tests.conformance.harness import HANG_S, Harness, Recorder, new_uid, run, until

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_output_and_code_come_back_apart(driver: Driver, sandbox: Handle) -> None:
    ran = await run(driver, sandbox, "echo out; echo err >&2; exit 3")
    assert (ran.code, ran.stdout, ran.stderr) == (3, b"out\n", b"err\n")
    assert ran.outcome.duration_s > 0


async def test_an_argv_is_not_parsed(driver: Driver, sandbox: Handle) -> None:
    ran = await run(driver, sandbox, ["/bin/echo", "$HOME;", "a  b"])
    assert ran.stdout == b"$HOME; a  b\n"


async def test_exactly_one_of_argv_and_shell(driver: Driver, sandbox: Handle) -> None:
    with pytest.raises(InvalidRequest):
        await run(driver, sandbox, ["true"], shell="true")


async def test_signal_death_is_128_plus_n(driver: Driver, sandbox: Handle) -> None:
    ran = await run(driver, sandbox, "kill -9 $$")
    assert (ran.code, ran.outcome.signal) == (137, "KILL")
    assert not ran.outcome.oom_killed


async def test_a_time_limit_ends_the_command(driver: Driver, sandbox: Handle) -> None:
    ran = await run(driver, sandbox, "echo early; sleep 600", timeout_s=1.5)
    assert ran.outcome.timed_out and not ran.outcome.oom_killed
    assert ran.stdout == b"early\n"


async def test_silence_ends_a_command(driver: Driver, sandbox: Handle) -> None:
    script = "echo 1; sleep 1.8; echo 2 >&2; sleep 1.8; echo 3; sleep 1.8; echo 4; sleep 600"
    ran = await run(driver, sandbox, script, idle_timeout_s=5)
    assert ran.outcome.timed_out and (ran.stdout, ran.stderr) == (b"1\n3\n4\n", b"2\n")
    assert 3 * 1.8 + 4.9 < ran.outcome.duration_s < HANG_S
    ran = await run(driver, sandbox, "sleep 0.3; echo end", timeout_s=HANG_S, idle_timeout_s=30)
    assert (ran.stdout, ran.outcome.timed_out) == (b"end\n", False)


async def test_stdin_is_streamed_and_closed(driver: Driver, sandbox: Handle) -> None:
    io = Recorder(stdin=[b"one ", b"two"])
    assert (await run(driver, sandbox, "cat", io=io, stdin=True)).stdout == b"one two"


async def test_without_stdin_the_input_has_ended(driver: Driver, sandbox: Handle) -> None:
    ran = await run(driver, sandbox, "cat", timeout_s=HANG_S)
    assert (ran.code, ran.stdout) == (0, b"")


async def test_a_signal_reaches_the_command(driver: Driver, sandbox: Handle) -> None:
    io = Recorder()
    script = "trap 'echo got; exit 5' TERM; echo ready; while :; do sleep 0.05; done"
    task = asyncio.ensure_future(run(driver, sandbox, script, io=io, timeout_s=HANG_S))
    await io.started.wait()
    io.order("TERM")
    ran = await task
    assert (ran.code, ran.stdout) == (5, b"ready\ngot\n")


async def test_cancelling_kills_the_tree(driver: Driver, sandbox: Handle) -> None:
    io = Recorder()
    script = "setsid sh -c 'sleep 8; touch /tmp/late' & echo ready; wait"
    task = asyncio.ensure_future(run(driver, sandbox, script, io=io))
    await io.started.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await asyncio.sleep(8.3)
    assert (await run(driver, sandbox, "test -e /tmp/late")).code == 1


async def test_defaults_of_the_sandbox_apply(harness: Harness) -> None:
    spec = harness.spec(uid=new_uid(), env={"A": "1", "B": "2"}, workdir="/tmp", user="agent")
    handle = await harness.driver.start(spec)
    try:
        ran = await run(harness.driver, handle, "echo $A $B $(pwd) $(id -un)", env={"B": "3"})
        assert ran.stdout == b"1 3 /tmp agent\n"
        ran = await run(harness.driver, handle, "pwd; id -un", cwd="/", user="root")
        assert ran.stdout == b"/\nroot\n"
    finally:
        await harness.driver.stop(handle)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"user": "nosuchuser"}, "user"),
        ({"cwd": "/no/such/folder"}, "cwd"),
        ({"env": {"X": "v" * 200_000}}, "env"),
        ({"env": {"A=B": "v"}}, "env.A=B"),
    ],
)
async def test_a_bad_field_is_named(
    driver: Driver, sandbox: Handle, changes: dict[str, object], field: str
) -> None:
    with pytest.raises(DsecError) as caught:
        await run(driver, sandbox, "true", **changes)
    assert caught.value.field == field


async def test_output_over_the_budget_keeps_head_and_tail(driver: Driver, sandbox: Handle) -> None:
    script = "echo HEAD; head -c 300000 /dev/zero | tr '\\0' x; echo TAIL"
    ran = await run(driver, sandbox, script, output_limit_bytes=10_000)
    assert len(ran.stdout) == 10_000
    assert ran.stdout.startswith(b"HEAD\n") and ran.stdout.endswith(b"TAIL\n")
    assert ran.outcome.truncated == (300_010 - 10_000, 0)


async def test_usage_counts_the_work(driver: Driver, sandbox: Handle) -> None:
    before = await driver.usage(sandbox)
    await run(driver, sandbox, "i=0; while [ $i -lt 30000 ]; do i=$((i+1)); done")
    after = await driver.usage(sandbox)
    assert after.cpu_s > before.cpu_s
    assert after.memory_peak_bytes >= after.memory_bytes > 0


async def test_commands_run_side_by_side(driver: Driver, sandbox: Handle) -> None:
    script = "echo {0} >/tmp/meet.{0}; until [ $(ls /tmp/meet.* | wc -l) = 5 ]; do sleep 0.02; done"
    ran = await asyncio.gather(
        *(run(driver, sandbox, script.format(i), timeout_s=HANG_S) for i in range(5))
    )
    assert all(r.code == 0 for r in ran)


async def test_a_slow_reader_gets_everything(driver: Driver, sandbox: Handle) -> None:
    io = Recorder(delay_s=0.01)
    ran = await run(driver, sandbox, "head -c 3000000 /dev/zero", io=io)
    assert len(ran.stdout) == 3_000_000
    assert ran.outcome.truncated == (0, 0)


async def test_exec_in_a_dead_sandbox_is_a_typed_error(harness: Harness) -> None:
    handle = await harness.driver.start(harness.spec(uid=new_uid()))
    task = asyncio.ensure_future(run(harness.driver, handle, "sleep 600"))
    await asyncio.sleep(0.2)
    await harness.crash(handle)
    with pytest.raises(DsecError) as caught:
        await task
    assert caught.value.code == "sandbox_died" and caught.value.is_infra
    await until(lambda: any(e.uid == handle.uid for e in harness.exits()))
    await harness.driver.stop(handle)
