"""Commands in real containers: time limits, drains, budgets, memory, users."""

from __future__ import annotations

import asyncio
import time

import pytest

from services.edge.drivers.base import Handle
from services.edge.drivers.container import ContainerDriver
from shared.errors import InvalidRequest
from tests.conformance.harness import HANG_S, SLEEPERS, new_uid, run
from tests.integration.container.harness import ContainerHarness

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.docker]

Box = tuple[ContainerDriver, Handle]


@pytest.fixture
def box(driver: ContainerDriver, sandbox: Handle) -> Box:
    return driver, sandbox


async def test_a_time_limit_kills_background_children_before_it_answers(box: Box) -> None:
    """(E01)"""
    ran = await run(*box, "sleep 300 & wait", timeout_s=2)
    assert ran.outcome.timed_out
    assert (await run(*box, SLEEPERS)).stdout == b"0\n"


async def test_a_time_limit_kills_children_of_other_sessions(box: Box) -> None:
    """(E01, E05) A double fork and setsid leave the process group, not the tree."""
    script = "setsid sh -c '(sleep 8; touch /tmp/late) & exit' & sleep 600"
    async with asyncio.timeout(HANG_S):
        ran = await run(*box, script, timeout_s=0.5)
    assert ran.outcome.timed_out
    await asyncio.sleep(8.2)
    assert (await run(*box, "test -e /tmp/late")).code == 1


async def test_the_limit_is_enforced_inside_even_when_the_edge_is_gone(
    harness: ContainerHarness, sandbox: Handle
) -> None:
    """(E02)"""
    task = asyncio.ensure_future(
        run(harness.driver, sandbox, "sleep 8; touch /tmp/late", timeout_s=0.4)
    )
    await asyncio.sleep(0.1)
    fresh = await harness.restart()
    assert await fresh.recover(sandbox, harness.spec(uid=sandbox.uid))
    await asyncio.sleep(8.2)
    assert (await run(fresh, sandbox, "test -e /tmp/late")).code == 1
    await asyncio.gather(task, return_exceptions=True)
    harness.driver._live.pop(sandbox.uid, None)
    fresh._live.pop(sandbox.uid).agent.close()


async def test_a_background_child_holds_nothing_up_and_lives_on(box: Box) -> None:
    """(E04)"""
    ran = await run(*box, "sleep 300 & echo ok", timeout_s=HANG_S)
    assert (ran.code, ran.stdout) == (0, b"ok\n")
    assert (await run(*box, "grep -qx sleep /proc/[0-9]*/comm")).code == 0


async def test_no_byte_is_lost_when_a_background_child_holds_the_pipe(box: Box) -> None:
    """(E06)"""
    script = "head -c 5000000 /dev/zero | tr '\\0' x; sleep 30 &"
    for _ in range(10):
        ran = await run(*box, script)
        assert len(ran.stdout) == 5_000_000 and ran.stdout.count(b"x") == 5_000_000


async def test_a_command_that_reads_its_input_finds_its_end(box: Box) -> None:
    """(E07)"""
    ran = await run(*box, ["cat"], timeout_s=HANG_S)
    assert (ran.code, ran.stdout, ran.outcome.timed_out) == (0, b"", False)


async def test_bytes_are_bytes(box: Box) -> None:
    """(E13)"""
    ran = await run(*box, "printf 'a\\226\\377b'; exit 3")
    assert (ran.code, ran.stdout) == (3, bytes([0x61, 0x96, 0xFF, 0x62]))


async def test_the_shell_alone_reads_the_command(box: Box) -> None:
    """(E15)"""
    ran = await run(*box, "x=$((1<<3)); cat <<EOF\n$x\nEOF")
    assert ran.stdout == b"8\n"
    ran = await run(*box, 'echo "unterminated', timeout_s=HANG_S)
    assert ran.code == 2 and ran.stderr


@pytest.mark.parametrize(("size", "dropped"), [(10_000, 0), (10_001, 1)])
async def test_dropped_bytes_are_counted_to_the_byte(box: Box, size: int, dropped: int) -> None:
    """(E16)"""
    ran = await run(*box, f"head -c {size} /dev/zero", output_limit_bytes=10_000)
    assert ran.outcome.truncated == (dropped, 0)
    assert len(ran.stdout) == size - dropped


async def test_an_endless_writer_keeps_head_tail_and_code(box: Box) -> None:
    """(E17)"""
    script = "echo BEGIN; head -c 20000000 /dev/zero | tr '\\0' A; echo END; echo END >&2; exit 4"
    ran = await run(*box, script, output_limit_bytes=1 << 20)
    assert ran.code == 4 and ran.stderr == b"END\n"
    assert ran.stdout.startswith(b"BEGIN\n") and ran.stdout.endswith(b"AEND\n")
    assert len(ran.stdout) == 1 << 20


async def test_long_output_does_not_push_out_the_error(box: Box) -> None:
    """(E18)"""
    script = "head -c 100001 /dev/zero; echo fatal >&2; exit 1"
    ran = await run(*box, script, output_limit_bytes=100_000)
    assert ran.stderr == b"fatal\n" and ran.outcome.truncated == (1, 0)


async def test_merged_output_keeps_its_order(box: Box) -> None:
    """(E20)"""
    script = "for i in $(seq 200); do echo o$i; echo e$i >&2; done"
    ran = await run(*box, script, merge=True)
    assert ran.stdout.split() == [f"{c}{i}".encode() for i in range(1, 201) for c in "oe"]
    assert ran.stderr == b""


async def test_running_out_of_memory_is_told_from_a_time_limit(box: Box) -> None:
    """(E22, E23)"""
    ran = await run(*box, "x=$(head -c 400000000 /dev/zero | tr '\\0' x); echo ${#x}")
    assert (ran.code, ran.outcome.signal, ran.outcome.oom_killed) == (137, "KILL", True)
    ran = await run(*box, "trap '' TERM; sleep 60", timeout_s=0.3)
    assert ran.outcome.timed_out and not ran.outcome.oom_killed
    ran = await run(*box, "kill -9 $$")
    assert ran.code == 137 and not ran.outcome.oom_killed
    assert (await box[0].usage(box[1])).oom_kills >= 1
    assert (await run(*box, "echo alive")).stdout == b"alive\n"


async def test_long_scripts_run_and_long_variables_are_refused(box: Box) -> None:
    """(E24)"""
    ran = await run(*box, "# " + "x" * 200_000 + "\necho ok")
    assert ran.stdout == b"ok\n"
    ran = await run(*box, "echo $(( 1 + 1 ))\n" + "# filling\n" * 400_000)
    assert ran.stdout == b"2\n"
    with pytest.raises(InvalidRequest) as caught:
        await run(*box, "true", env={"X": "v" * 200_000})
    assert caught.value.field == "env"
    with pytest.raises(InvalidRequest) as caught:
        await run(*box, "true", env={f"X{i}": "v" * 100_000 for i in range(60)})
    assert caught.value.field == "env"


async def test_folder_and_variables_are_fields_of_the_call(box: Box) -> None:
    """(E26)"""
    value = "1\n'2' $HOME"
    await run(*box, ["mkdir", "-p", "/tmp/a b é"])
    ran = await run(*box, 'pwd; printf %s "$X"', cwd="/tmp/a b é", env={"X": value})
    assert ran.stdout.decode() == f"/tmp/a b é\n{value}"
    ran = await run(*box, "tr '\\0' ' ' </proc/$$/cmdline", env={"X": "needle" + value})
    assert b"needle" not in ran.stdout


async def test_nothing_of_the_edges_own_environment_is_seen(box: Box) -> None:
    ran = await run(*box, "env | sort", env={"MINE": "1"})
    names = {line.split("=")[0] for line in ran.stdout.decode().splitlines()}
    shells_own = {"PWD", "SHLVL", "_", "OLDPWD"}
    assert names - shells_own == {
        "PATH", "HOME", "USER", "LOGNAME", "TERM", "PAGER", "LANG", "MINE",
    }  # fmt: skip


async def test_orphans_are_reaped(box: Box) -> None:
    """(E28) The sandbox has 64 processes; 200 orphans must not use them up."""
    for _ in range(200):
        assert (await run(*box, "(sleep 0.1 &) ; true")).code == 0
    async with asyncio.timeout(HANG_S):
        while True:
            ran = await run(*box, "cat /proc/[0-9]*/comm | grep -cx sleep; echo works")
            if ran.stdout.split() == [b"0", b"works"]:
                return
            await asyncio.sleep(0.1)


async def test_one_shot_commands_run_in_parallel(box: Box) -> None:
    """(E29)"""
    script = (
        "echo >/tmp/par.{0}; until [ $(ls /tmp/par.* | wc -l) -ge 12 ]; do sleep .02; done; "
        "echo {0}"
    )
    done = await asyncio.gather(*(run(*box, script.format(i), timeout_s=HANG_S) for i in range(12)))
    assert [r.stdout for r in done] == [b"%d\n" % i for i in range(12)]


async def test_the_user_applies_per_call(box: Box) -> None:
    """(E33)"""
    assert (await run(*box, "id -u", user="root")).stdout == b"0\n"
    ran = await run(*box, "id -u; id -G; echo $HOME $USER; umask", user="agent")
    assert ran.stdout == b"1000\n1000 2000\n/home/agent agent\n0022\n"
    assert (await run(*box, "id -u; echo $HOME", user="nobody")).stdout == b"65534\n/nonexistent\n"
    assert (await run(*box, "id -u; id -g", user="4321:77")).stdout == b"4321\n77\n"
    await run(*box, "echo flag >/flag; chmod 400 /flag")
    assert (await run(*box, "cat /flag", user="nobody")).code == 1
    with pytest.raises(InvalidRequest, match="mallory"):
        await run(*box, "id", user="mallory")


async def test_what_cannot_run_ends_as_in_a_shell(box: Box) -> None:
    ran = await run(*box, ["/no/such/program"])
    assert ran.code == 127 and b"/no/such/program" in ran.stderr
    ran = await run(*box, ["/etc/passwd"])
    assert ran.code == 126 and b"/etc/passwd" in ran.stderr


async def leaf(box: Box, script: str = "") -> str:
    ran = await run(*box, script + "grep '^0::' /proc/self/cgroup")
    return ran.stdout.decode().strip()


async def test_commands_take_turns_in_places_that_are_ready(box: Box) -> None:
    """Entering a cgroup costs milliseconds; a place that is empty again is used again."""
    async with asyncio.timeout(HANG_S):
        while True:  # one that is not empty yet when it is looked for is no fault
            places = set()
            for _ in range(12):
                places.add(await leaf(box))
                await asyncio.sleep(0.02)
            if len(places) <= 6:
                return


async def test_what_a_command_left_behind_shares_its_place_with_no_later_one(box: Box) -> None:
    """Else the later one's time limit would kill it."""
    kept = await leaf(box, "sleep 300 & ")
    assert kept not in {await leaf(box) for _ in range(6)}
    for _ in range(4):
        assert (await run(*box, "sleep 60", timeout_s=0.1)).outcome.timed_out
    assert (await run(*box, SLEEPERS)).stdout == b"1\n"


async def test_a_fork_bomb_meets_its_limit_and_can_be_stopped(harness: ContainerHarness) -> None:
    """(T11)"""
    handle = await harness.driver.start(harness.spec(uid=new_uid(), pids=48, cpu_cores=0.5))
    ran = await run(harness.driver, handle, "f() { f | f & }; f; sleep 30", timeout_s=2)
    assert ran.outcome.timed_out
    assert (await run(harness.driver, handle, "echo alive")).stdout == b"alive\n"
    bomb = asyncio.ensure_future(run(harness.driver, handle, "f() { f | f & }; f; sleep 30"))
    await asyncio.sleep(0.5)
    async with asyncio.timeout(HANG_S):
        await harness.driver.stop(handle)
    await asyncio.gather(bomb, return_exceptions=True)


async def test_processes_are_as_many_as_asked_for(harness: ContainerHarness) -> None:
    handle = await harness.driver.start(harness.spec(uid=new_uid(), pids=20))
    try:
        ran = await run(harness.driver, handle, "for i in $(seq 40); do sleep 5 & done; echo end")
        assert b"fork" in ran.stderr.lower()
    finally:
        await harness.driver.stop(handle)


async def test_cores_are_as_many_as_asked_for(harness: ContainerHarness) -> None:
    handle = await harness.driver.start(harness.spec(uid=new_uid(), cpu_cores=0.25))
    try:
        began = time.monotonic()
        script = "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done"
        before = (await harness.driver.usage(handle)).cpu_s
        await run(harness.driver, handle, script, timeout_s=HANG_S)
        spent = (await harness.driver.usage(handle)).cpu_s - before
        assert spent < 0.35 * (time.monotonic() - began) + 0.1
    finally:
        await harness.driver.stop(handle)
