"""Faults of commands, seen by a client of the whole system on a real container."""

from __future__ import annotations

import asyncio

import pytest

from libdsec import DSecClient, DSecError, InvalidRequest, Sandbox
from tests.conformance.harness import SLEEPERS
from tests.e2e.conftest import until
from tests.faults.conftest import CREATE_S, HANG_S, container_args

pytestmark = [pytest.mark.docker]


async def sleepers(box: Sandbox) -> int:
    return int((await box.exec(SLEEPERS)).text)


async def test_a_time_limit_ends_the_whole_tree_before_it_answers(box: Sandbox) -> None:
    """(E01) Background children, also of a session of their own or re-parented."""
    await box.exec("killall -9 sleep")
    script = "sleep 300 & setsid sleep 300 & (sleep 300 &) ; echo begun; wait"
    async with asyncio.timeout(HANG_S):
        ran = await box.exec(script, timeout=2)
    assert (ran.timed_out, ran.ok, ran.stdout) == (True, False, b"begun\n")
    assert await sleepers(box) == 0


async def test_silence_is_limited_inside_too(box: Sandbox) -> None:
    """(E01, E02) The whole tree ends by it, in a session as elsewhere; output puts it off,
    a turn that has not come does not bring it on."""
    for run in (box.exec, box.session("silent").run):
        queued = asyncio.create_task(run("echo a; sleep .3; echo b; sleep .3; echo c", timeout=60))
        ran = await run("(setsid sleep 361 &); echo on; sleep 361", idle_timeout=1.5)
        assert ran.timed_out and ran.stdout == b"on\n" and (await queued).stdout == b"a\nb\nc\n"
        told = "echo a; sleep 1.8; echo b; sleep 1.8; echo c; sleep 1.8; echo d"
        ran = await run(told, idle_timeout=5)
        assert (ran.timed_out, ran.stdout) == (False, b"a\nb\nc\nd\n")
    left = await box.exec("cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -c 'sleep 36[1] '")
    assert left.text == "0\n"
    async with await box.spawn("echo on; sleep 362", idle_timeout=0.4, pty=(24, 80)) as process:
        assert (await process.wait()).timed_out


async def test_what_a_limit_ended_writes_nothing_later(box: Sandbox) -> None:
    """(E02) The limit is kept inside; a client that goes away changes nothing."""
    script = "(trap '' TERM HUP INT; sleep 8; touch /tmp/late.$0) & sleep 60"
    ran = await box.exec("sh", "-c", script, "limited", timeout=0.3)
    assert ran.timed_out
    going = asyncio.create_task(box.exec("sh", "-c", script, "cancelled"))
    await asyncio.sleep(0.3)
    going.cancel()
    await asyncio.gather(going, return_exceptions=True)
    await asyncio.sleep(8.5)
    assert not [f.name for f in await box.files.list("/tmp") if f.name.startswith("late")]


@pytest.mark.parametrize("how", ["exec", "shell"])
async def test_a_background_child_holds_no_result_up_and_lives_on(box: Sandbox, how: str) -> None:
    """(E04)"""
    await box.exec("killall -9 sleep")
    run = box.exec if how == "exec" else box.run_shell
    ran = await run("sleep 300 & echo ok", timeout=HANG_S)
    assert (ran.exit_code, ran.stdout) == (0, b"ok\n")
    assert (await run("echo next")).stdout == b"next\n"
    assert await sleepers(box) == 1


@pytest.mark.parametrize("how", ["exec", "shell"])
async def test_a_command_that_reads_finds_the_end_of_its_input(box: Sandbox, how: str) -> None:
    """(E07)"""
    run = box.exec if how == "exec" else box.run_shell
    ran = await run("cat; read line; echo $?", timeout=HANG_S)
    assert (ran.stdout, ran.timed_out) == (b"1\n", False)


async def test_bytes_that_are_no_text_come_back_as_they_were(box: Sandbox) -> None:
    """(E13)"""
    for run in (box.exec, box.run_shell):
        ran = await run("printf 'a\\226\\377b'; printf '\\300' >&2; (exit 3)")
        assert (ran.exit_code, ran.stdout) == (3, b"a\x96\xffb")
        assert (ran.text, ran.stderr_text) == ("a\ufffd\ufffdb", "\ufffd")
    everything = bytes(range(256)) * 300
    assert (await box.exec("cat", stdin=everything)).stdout == everything


async def test_the_exit_follows_the_last_byte_of_a_stream(box: Sandbox) -> None:
    """(E21)"""
    process = await box.spawn("echo a; head -c 300000 /dev/zero; echo b >&2; exit 5")
    out = b"".join([chunk async for chunk in process.stdout])
    assert (len(out), out[:2]) == (300_002, b"a\n")
    result = await process.wait()
    assert (result.exit_code, result.signal) == (5, None)
    seen: list[bytes] = []
    ran = await box.exec("echo a; exit 5", on_output=lambda _, data: seen.append(data))
    assert (ran.exit_code, b"".join(seen)) == (5, b"a\n")


@pytest.mark.parametrize(("last", "limit"), [(10_000, 64 << 10), (2_500_000, None)])
async def test_following_goes_on_while_what_is_kept_rolls_over(
    box: Sandbox, last: int, limit: int | None
) -> None:
    """(O01) Every line once, in order, without a NUL: at a cap, and past everything that is
    kept anywhere, with the connection's operations asked for again in the middle."""
    process = await box.spawn(f"seq 1 {last}", output_limit_bytes=limit, stdin=False)
    got = bytearray()
    async for chunk in process.stdout:
        if len(got) // (4 << 20) != (len(got) + len(chunk)) // (4 << 20):
            box._core.operations.reattach()
        got += chunk
    assert bytes(got) == b"".join(b"%d\n" % n for n in range(1, last + 1))
    result = await process.wait()
    assert (result.exit_code, result.truncated) == (0, (0, 0))


async def test_a_death_by_signal_has_its_name(box: Sandbox) -> None:
    """(E22)"""
    for name, code in (("KILL", 137), ("TERM", 143), ("SEGV", 139)):
        ran = await box.exec(f"kill -{name} $$")
        assert (ran.exit_code, ran.signal, ran.oom_killed) == (code, name, False)
    ran = await box.exec("exit 137")
    assert (ran.exit_code, ran.signal) == (137, None), "a code is no signal"


async def test_who_killed_a_command_is_told_apart(box: Sandbox) -> None:
    """(E22, E23) Out of memory, over its time, by its own hand."""
    hog = "x=$(head -c 400000000 /dev/zero | tr '\\0' x); echo ${#x}"
    ran = await box.exec(hog, timeout=HANG_S)
    assert (ran.exit_code, ran.signal, ran.oom_killed, ran.timed_out) == (137, "KILL", True, False)
    ran = await box.exec("trap '' TERM; sleep 60", timeout=0.3)
    assert (ran.timed_out, ran.oom_killed) == (True, False)
    ran = await box.exec("kill -9 $$")
    assert (ran.timed_out, ran.oom_killed) == (False, False)
    assert (await box.info()).state == "running", "nothing of it is the sandbox's end"


async def test_long_scripts_run(box: Sandbox) -> None:
    """(E24) Longer than one argument may be."""
    for run in (box.exec, box.run_shell):
        ran = await run("# " + "x" * 200 * 1024 + "\necho ok", timeout=HANG_S)
        assert ran.stdout == b"ok\n"
    ran = await box.exec("echo", "x" * 100_000)
    assert len(ran.stdout) == 100_001


async def test_what_is_too_long_is_refused_by_name_before_it_starts(box: Sandbox) -> None:
    """(E24, E26) A variable, an argument, a whole environment, a script over the limit."""
    huge = "v" * 200 * 1024
    cases = {
        "env": {"command": ("touch /tmp/ran",), "env": {"X": huge}},
        "argv": {"command": ("sh", "-c", "touch /tmp/ran", huge)},
        "payload": {"command": ("touch /tmp/ran\n" + "#" * 9_000_000,)},
    }
    for field, call in cases.items():
        with pytest.raises(InvalidRequest) as caught:
            await box.exec(*call.pop("command"), **call)
        assert caught.value.field == field
    with pytest.raises(InvalidRequest) as caught:
        await box.exec("touch /tmp/ran", env={f"X{i}": "v" * 100_000 for i in range(60)})
    assert caught.value.field == "env"
    assert not await box.files.exists("/tmp/ran")


async def test_folder_and_variables_are_fields_and_show_nowhere(box: Sandbox) -> None:
    """(E26)"""
    value = "1\n'2' $HOME needle"
    await box.files.mkdir("/tmp/a b é")
    ran = await box.exec('pwd; printf %s "$X"', cwd="/tmp/a b é", env={"X": value})
    assert ran.text == f"/tmp/a b é\n{value}"
    ran = await box.exec("cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' '", env={"X": value})
    assert ran.ok and "needle" not in ran.text
    for bad in ({"A=B": "x"}, {"A": "\0"}, {"": "x"}):
        with pytest.raises(DSecError) as caught:
            await box.exec("true", env=bad)
        assert caught.value.code == "invalid_request"
    with pytest.raises(DSecError) as caught:
        await box.exec("true", cwd="/no/such/folder")
    assert caught.value.code in ("not_found", "invalid_request")


async def test_orphans_use_up_no_process_numbers(client: DSecClient) -> None:
    """(E28) 200 orphans in a sandbox of 64 processes."""
    async with await client.run_container(container_args(), timeout=CREATE_S) as box:
        for _ in range(200):
            assert (await box.exec("(sleep 0.1 &) ; true")).ok

        async def reaped() -> bool:
            ran = await box.exec("cat /proc/[0-9]*/comm | grep -cx sleep; echo works")
            return ran.text.split() == ["0", "works"]

        await until(reaped, what="no orphan is left, not even as a zombie")
