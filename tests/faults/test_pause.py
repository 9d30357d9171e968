"""Faults of pause, idleness and time limits: on the whole system, through the client."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from libdsec import Sandbox, SandboxDied, Unavailable
from tests.e2e.conftest import until
from tests.faults.conftest import CREATE_S, HANG_S, World, container_args, fake_args


async def shown(box: Sandbox) -> str:
    """Its state as anybody reads it."""
    return (await box.info()).state


async def until_state(box: Sandbox, state: str) -> None:
    async def reached() -> bool:
        return await shown(box) == state

    await until(reached, what=state)


async def until_listed(world: World, box: Sandbox, state: str) -> None:
    """The services hear of it from its node, a moment later."""

    async def listed() -> bool:
        return {s.uid: s.state async for s in world.client.list()}[box.uid] == state

    await until(listed, what=f"listed as {state}")


async def test_changes_survive_every_pause(box: Sandbox) -> None:
    """(L08)"""
    for i in range(5):
        await box.files.write(f"/w/{i}", f"content {i}")
        await box.pause()
        assert await shown(box) == "paused"
        await box.resume()
        for n in range(i + 1):
            assert await box.files.read(f"/w/{n}", text=True) == f"content {n}"


async def test_a_resume_right_after_a_pause_is_one(box: Sandbox) -> None:
    """(L11)"""
    for i in range(20):
        await box.pause()
        if i % 2:
            await box.resume()
        assert (await box.exec(f"echo {i}")).stdout == f"{i}\n".encode()
    assert await shown(box) == "running"


async def test_a_resume_that_overtakes_a_pause_is_no_loss(box: Sandbox) -> None:
    """(L11)"""
    for _ in range(5):
        both = await asyncio.gather(box.pause(), box.resume(), return_exceptions=True)
        assert both == [None, None], both
        assert (await box.exec("echo on")).stdout == b"on\n"


async def test_any_operation_resumes_and_processes_live_on(box: Sandbox) -> None:
    shell = "i=0; while sleep 0.05; do i=$((i+1)); echo $i >/tmp/c; mv /tmp/c /tmp/count; done"
    ticking = await box.spawn(shell)
    await box.run_shell("cd /tmp; x=kept")
    operations = (
        lambda: box.exec("true"),
        lambda: box.files.write("/tmp/new", b"x"),
        lambda: box.files.list("/tmp"),
        lambda: box.run_shell("test $x = kept"),
        lambda: ticking.signal("CONT"),
    )
    for operation in operations:
        await box.pause()
        before = (await box.info()).state
        await operation()
        await until_state(box, "running")
        assert before == "paused"
    await until(lambda: box.files.exists("/tmp/count"), what="the process runs")
    first = int(await box.files.read("/tmp/count"))

    async def counts_on() -> bool:
        return int(await box.files.read("/tmp/count")) > first

    await until(counts_on, what="the process goes on")
    await ticking.kill()


async def test_a_terminal_and_a_connection_live_on(box: Sandbox) -> None:
    await box.exec("(nc -ll -p 7100 -e cat </dev/null >/dev/null 2>&1 &)")
    connection = await box.connect(7100, wait=HANG_S)
    terminal = await box.spawn("sh", pty=(24, 80))
    seen = b""
    for n in range(3):
        await box.pause()
        await terminal.write(f"echo said$(({n}+1))\n")
        while f"said{n + 1}".encode() not in seen:
            seen += await asyncio.wait_for(anext(aiter(terminal.stdout)), HANG_S)
        await box.pause()
        await connection.write(b"ping")
        assert await asyncio.wait_for(connection.read(), HANG_S) == b"ping"
    await box.pause()
    again = await box.connect(7100)
    await again.write(b"new")
    assert await asyncio.wait_for(again.read(), HANG_S) == b"new"
    await again.abort()
    await connection.abort()
    await terminal.kill()


async def test_many_at_once_resume_it_once(world: World, box: Sandbox) -> None:
    await box.pause()
    await until_listed(world, box, "paused")
    seen: list[str] = []

    async def listen() -> None:
        async for event in world.client.events():
            if event.uid == box.uid:
                seen.append(event.state)

    listening = asyncio.ensure_future(listen())
    await asyncio.sleep(0.3)
    await world.client._core.link.flush(HANG_S)
    results = await asyncio.gather(*(box.exec(f"echo {n}") for n in range(20)))
    assert [r.stdout for r in results] == [f"{n}\n".encode() for n in range(20)]

    async def told() -> bool:
        return "running" in seen

    await until(told, what="its resumption is told")
    await asyncio.sleep(0.2)  # one too many would come about now
    listening.cancel()
    assert seen.count("running") == 1


async def test_a_command_of_a_paused_sandbox_has_its_whole_time_afterwards(box: Sandbox) -> None:
    command = ": >/tmp/begun; until [ -e /tmp/go ]; do sleep 0.1; done; echo done"
    running = asyncio.ensure_future(box.exec(command, timeout=8, idle_timeout=7.9))
    await until(lambda: box.files.exists("/tmp/begun"), what="the command runs")
    await box.pause()
    await asyncio.sleep(8.2)
    assert not running.done()
    await box.resume()
    await box.files.write("/tmp/go", b"")
    result = await running
    assert (result.stdout, result.timed_out) == (b"done\n", False)
    assert result.duration_s < 8


async def test_listing_info_and_metrics_show_it_and_wake_nothing(
    world: World, box: Sandbox
) -> None:
    await box.pause()
    info = await box.info()
    assert info.state == "paused" and info.usage["memory_bytes"] > 0
    assert (await box.metrics())["pids"] > 0
    await until_listed(world, box, "paused")
    assert await shown(box) == "paused"
    await box.resume()


async def test_a_failed_resume_blocks_nothing(world: World) -> None:
    """(L12)"""
    async with await world.client.create(fake_args(resume_error=1)) as box:
        await box.pause()
        with pytest.raises(Unavailable):
            await box.resume()
        assert await shown(box) == "paused"
        await box.resume()
        assert await shown(box) == "running"
    again = await world.client.create(fake_args(resume_error=9))
    await again.pause()
    with pytest.raises(Unavailable):
        await again.resume()
    await asyncio.wait_for(again.stop(), HANG_S)


async def test_an_edge_that_dies_keeps_a_pause(world: World) -> None:
    """(L14, L15)"""
    args = container_args()
    async with await world.client.run_container(args, timeout=CREATE_S) as box:
        await box.run_shell("x=kept")
        await box.pause()
        await world.system.restart(world.edge)
        await until_state(box, "paused")
        assert (await box.run_shell("echo $x")).stdout == b"kept\n"
        await world.system.restart(world.edge)
        await until_state(box, "running")
        assert (await box.run_shell("echo $x")).stdout == b"kept\n"


async def test_a_pause_that_a_frozen_edge_does_not_answer_is_done_when_it_is_back(
    world: World,
) -> None:
    """(L14) The client is told so, and the scheduler remembers it."""
    async with await world.client.create(fake_args(), timeout=CREATE_S) as box:
        pid = world.system.pids()[world.edge]
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        try:
            async with asyncio.timeout(60):
                with pytest.raises(Unavailable, match=r"pausing: node .* is silent"):
                    await box.pause()
        finally:
            os.kill(pid, signal.SIGCONT)
        await until_listed(world, box, "paused")
        assert await shown(box) == "paused"
        await box.resume()
        assert (await box.exec("echo on")).stdout == b"on\n"


async def test_idle_containers_pause_and_come_back(world: World) -> None:
    """(L10, L19)"""
    args = container_args(ttl_running_stop=0.8, on_timeout="pause")
    async with await world.client.run_container(args, timeout=CREATE_S) as box:
        for n in range(3):
            await until_state(box, "paused")
            assert (await box.exec(f"echo {n}")).stdout == f"{n}\n".encode()
        for n in range(6):
            await asyncio.sleep(0.79 + n % 3 * 0.01)
            assert (await box.exec(f"echo {n}")).stdout == f"{n}\n".encode()


async def test_a_command_over_a_restart_is_activity(world: World) -> None:
    args = container_args(ttl_running_stop=6.0)
    box = await world.client.run_container(args, timeout=CREATE_S)
    command = asyncio.ensure_future(box.exec(": >/tmp/begun; sleep 10"))
    await until(lambda: box.files.exists("/tmp/begun"), what="the command runs")
    await world.system.restart(world.edge)
    result = await command
    assert result.exit_code == 0
    await until_state(box, "stopped")
    with pytest.raises(SandboxDied) as caught:
        await box.exec("true")
    assert caught.value.cause == "idle_timeout"


async def test_a_deadline_ends_a_paused_container(world: World) -> None:
    """(L17)"""
    args = container_args(deadline_s=60.0)
    box = await world.client.run_container(args, timeout=CREATE_S)
    await box.pause()
    await box.set_timeout(deadline_s=1.0)
    await until_state(box, "stopped")
    with pytest.raises(SandboxDied) as caught:
        await box.exec("true")
    assert caught.value.cause == "deadline"


async def test_a_paused_container_is_stopped_at_once(world: World) -> None:
    """(L06)"""
    for grace_s in (0.0, 0.5):
        box = await world.client.run_container(container_args(), timeout=CREATE_S)
        await box.spawn("sleep 1000")
        await box.pause()
        await asyncio.wait_for(box.stop(grace_s=grace_s), HANG_S)
        assert await shown(box) == "stopped"
