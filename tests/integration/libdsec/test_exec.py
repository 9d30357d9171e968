"""Commands over a real server, with links that break."""

from __future__ import annotations

import asyncio

import pytest

from libdsec import (
    DSecClient,
    ExecFailed,
    ExecTimeout,
    InvalidRequest,
    Sandbox,
    SandboxDied,
    StdinClosed,
    Unavailable,
    _ids,
    _operation,
)
from tests.integration.libdsec.conftest import until
from tests.integration.libdsec.peer import Peer

pytestmark = pytest.mark.integration


async def test_code_output_and_streams_are_separate(sandbox: Sandbox):
    result = await sandbox.exec("echo out; echo err >&2; exit 3")
    assert (result.exit_code, result.stdout, result.stderr) == (3, b"out\n", b"err\n")
    merged = await sandbox.exec("echo a; echo b >&2", merge=True)
    assert (merged.stdout, merged.stderr) == (b"a\nb\n", b"")
    argv = await sandbox.exec("printf", "%s|", "a b", "$HOME")
    assert argv.text == "a b|$HOME|"
    env = await sandbox.exec('echo "$X"', env={"X": "1 2"})
    assert env.text == "1 2\n"


async def test_check_raises_with_the_result(sandbox: Sandbox):
    with pytest.raises(ExecFailed) as failed:
        await sandbox.exec("echo partial; exit 4", check=True)
    assert failed.value.result.stdout == b"partial\n"
    with pytest.raises(ExecTimeout) as late:
        await sandbox.exec("echo partial; sleep 60", timeout=1.5, check=True)
    assert late.value.result.stdout == b"partial\n"
    assert not late.value.is_infra


async def test_a_time_limit_is_a_result_and_no_transport_error(sandbox: Sandbox):
    """(E31)"""
    result = await sandbox.exec("echo partial; sleep 60", timeout=1.5)
    assert (result.timed_out, result.stdout) == (True, b"partial\n")


async def test_bytes_that_are_no_text_arrive(sandbox: Sandbox):
    """(E13)"""
    result = await sandbox.exec(r"printf 'a\226\377b'; exit 3")
    assert (result.exit_code, result.stdout, result.text) == (3, b"a\x96\xffb", "a��b")


async def test_a_character_split_over_two_writes_stays_one(sandbox: Sandbox):
    """(E14)"""
    process = await sandbox.spawn(r"printf '\303'; sleep 0.2; printf '\251\n'", stdin=False)
    process = await sandbox.spawn(r"printf '\303'; sleep 0.2; printf '\251\n'", stdin=False)
    assert "".join([t async for t in process.stdout.text()]) == "é\n"


async def test_the_exit_comes_after_the_last_byte(sandbox: Sandbox):
    """(E21)"""
    process = await sandbox.spawn("echo a; exit 5", stdin=False)
    assert [line async for line in process.stdout.lines()] == ["a"]
    assert (await process.wait()).exit_code == 5


async def test_input_can_be_ended_and_not_written_after(sandbox: Sandbox):
    """(E08)"""
    process = await sandbox.spawn("wc -c")
    await process.write("abc")
    await process.close_stdin()
    with pytest.raises(StdinClosed):
        await process.write("x")
    assert (await process.wait()).text.strip() == "3"
    over = await sandbox.spawn("exit 0")
    await over.wait()
    with pytest.raises(StdinClosed):
        await over.write("x")


async def test_much_goes_in_and_out_within_the_windows(peer: Peer, sandbox: Sandbox):
    data = bytes(range(256)) * (24 * 4096)
    result = await sandbox.exec("tee /dev/stderr", stdin=data, output_limit_bytes=1 << 30)
    assert result.stdout == data == result.stderr
    assert peer.door.max_unacked <= _operation._flow.WINDOW_BYTES


async def test_a_stream_nobody_reads_does_not_stop_the_other(sandbox: Sandbox):
    script = "head -c 20000000 /dev/zero >&2; echo done"
    process = await sandbox.spawn(script, stdin=False)
    assert b"".join([part async for part in process.stdout]) == b"done\n"
    result = await process.wait()
    assert len(result.stderr) + result.truncated[1] == 20_000_000
    waited = await sandbox.spawn(script, stdin=False)
    assert (await waited.wait()).exit_code == 0


async def test_output_is_told_as_it_comes(sandbox: Sandbox):
    seen: list[tuple[str, bytes]] = []
    result = await sandbox.run_shell(
        "echo 1; sleep 0.2; echo 2 >&2", on_output=lambda name, data: seen.append((name, data))
    )
    assert seen == [("stdout", b"1\n"), ("stderr", b"2\n")]
    assert result.ok


async def test_silence_of_a_command_can_be_limited(sandbox: Sandbox):
    script = "for i in 1 2 3 4; do echo $i; sleep 1.2; done; sleep 60"
    result = await sandbox.exec(script, idle_timeout=4.0)
    assert (result.timed_out, result.stdout) == (True, b"1\n2\n3\n4\n")


async def test_a_cancelled_wait_kills_the_command(peer: Peer, sandbox: Sandbox):
    mark = peer.door.root / "alive"
    waiting = asyncio.create_task(sandbox.exec(f"sleep 200; touch {mark}"))
    await until(peer.door.running)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await until(lambda: not peer.door.running())
    assert not mark.exists()


async def test_signals_and_kill_reach_the_command(sandbox: Sandbox):
    script = "trap 'echo got; exit 7' USR1; echo ready; while :; do sleep 0.05; done"
    process = await sandbox.spawn(script)
    assert await anext(process.stdout) == b"ready\n"
    await process.signal("SIGUSR1")
    assert (await process.wait()).exit_code == 7
    async with await sandbox.spawn("sleep 60") as killed:
        pass
    assert (await killed.wait()).signal == "KILL"


async def test_lost_frames_are_sent_again_and_nothing_runs_twice(peer: Peer, sandbox: Sandbox):
    script = "for i in $(seq 1 30); do echo line $i; sleep 0.01; done"
    op_id = _ids.new()
    running = asyncio.create_task(sandbox.exec(script, op_id=op_id))
    await until(lambda: peer.door.runs)
    peer.door.drop_frames = 2
    result = await running
    assert result.text.split("\n")[:-1] == [f"line {i}" for i in range(1, 31)]
    assert peer.door.runs == {op_id: 1}


async def test_a_server_that_dies_under_a_command_costs_nothing(peer: Peer, sandbox: Sandbox):
    script = "for i in $(seq 1 40); do echo line $i; sleep 0.05; done; cat"
    data = b"x" * 3_000_000
    op_id = _ids.new()
    running = asyncio.create_task(sandbox.exec(script, stdin=data, op_id=op_id))
    await until(lambda: peer.door.runs)
    await asyncio.sleep(0.3)
    await peer.kick()
    result = await asyncio.wait_for(running, 60)
    lines = b"".join(b"line %d\n" % i for i in range(1, 41))
    assert result.stdout == lines + data
    assert peer.door.runs == {op_id: 1}


async def test_a_silent_edge_is_asked_again(
    peer: Peer, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(_operation, "SILENCE_S", 1.0)
    peer.door.mute = True
    op_id = _ids.new()
    running = asyncio.create_task(sandbox.exec("echo once", op_id=op_id))
    await asyncio.sleep(0.5)
    peer.door.mute = False
    assert (await asyncio.wait_for(running, 60)).stdout == b"once\n"
    assert peer.door.runs == {op_id: 1}


async def test_a_node_that_is_away_for_a_moment_is_waited_for(peer: Peer, sandbox: Sandbox):
    await peer.door.leave()
    running = asyncio.create_task(sandbox.exec("echo back"))
    await asyncio.sleep(0.6)
    await peer.door.open(peer._client)
    assert (await asyncio.wait_for(running, 60)).text == "back\n"


async def test_a_node_that_stays_away_is_unavailable(
    peer: Peer, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(_operation, "UNREACHABLE_S", 1.0)
    await peer.door.leave()
    with pytest.raises(Unavailable) as caught:
        await asyncio.wait_for(sandbox.exec("true"), 60)
    assert caught.value.is_infra


async def test_a_node_that_is_lost_is_a_dead_sandbox(peer: Peer, sandbox: Sandbox):
    running = asyncio.create_task(sandbox.exec("sleep 60"))
    await until(lambda: peer.door.runs)
    await peer.door.leave()
    peer.door.mute = True
    peer.lose(sandbox.uid)
    client: DSecClient = sandbox._core
    client.operations.reattach()
    with pytest.raises(SandboxDied) as caught:
        await asyncio.wait_for(running, 60)
    assert caught.value.cause == "node_lost"


async def test_a_full_door_is_asked_again(peer: Peer, sandbox: Sandbox):
    peer.door.refuse_busy = 3
    assert (await sandbox.exec("echo in")).text == "in\n"


async def test_a_repeated_operation_does_not_run_again(peer: Peer, sandbox: Sandbox):
    op_id = _ids.new()
    first = await sandbox.exec("date +%N", op_id=op_id)
    again = await sandbox.exec("date +%N", op_id=op_id)
    assert first.stdout == again.stdout
    assert peer.door.runs == {op_id: 1}


@pytest.mark.parametrize(
    ("command", "options", "field"),
    [
        ((), {}, "command"),
        (("a\x00b",), {}, "command"),
        (("true",), {"timeout": -1}, "timeout"),
        (("true",), {"timeout": float("nan")}, "timeout"),
        (("true",), {"user": ""}, "user"),
        (("true",), {"output_limit_bytes": -1}, "output_limit_bytes"),
    ],
)
async def test_nonsense_is_refused_by_name(peer: Peer, sandbox: Sandbox, command, options, field):
    with pytest.raises(InvalidRequest) as caught:
        await sandbox.exec(*command, **options)
    assert caught.value.field == field
    assert peer.door.runs == {}


async def test_many_commands_at_once(sandbox: Sandbox):
    results = await asyncio.gather(*(sandbox.exec(f"echo {i}") for i in range(60)))
    assert [r.text for r in results] == [f"{i}\n" for i in range(60)]
