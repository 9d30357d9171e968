"""The bus goes, the edge goes: sandboxes stay, nothing is lost, doubled or left over."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path

from devstack.process import free_port
from schemas.base import decode
from schemas.exec import ExecReply, ExecRequest, FileRequest, InfoRequest
from services.edge.app import Edge
from services.edge.settings import Settings
from shared import ids
from tests.integration.edge.cluster import WAIT_S, Cluster, cluster, until

RESTARTS = 5


async def back(system: Cluster, *, joins: int = 2) -> None:
    """Waits until the edge has joined again."""
    await until(lambda: len(system.scheduler.joins) >= joins)


async def restart_edge(system: Cluster, number: signal.Signals = signal.SIGKILL) -> None:
    before = len(system.scheduler.joins)
    await system.edge.kill(number)
    await system.edge.start()
    await back(system, joins=before + 1)


async def restart_nats(system: Cluster) -> None:
    await system.nats.child.kill()
    await asyncio.sleep(0.3)
    await system.nats.start()
    await until(lambda: system.caller.client.is_connected)
    await until(lambda: system.scheduler.bus.client.is_connected)


async def started(system: Cluster, uid: str, **spec: object) -> None:
    """Sends a start until the stream has it (right after a restart it may refuse)."""
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                await system.scheduler.start([uid], **spec)  # type: ignore[arg-type]
                return
            except Exception:
                await asyncio.sleep(0.2)


async def test_commands_flow_again_after_each_restart_of_the_bus(system: Cluster) -> None:
    """(B01)"""
    kept = await system.running()
    for n in range(RESTARTS):
        await restart_nats(system)
        await back(system, joins=n + 2)
        uid = ids.new()
        await started(system, uid)
        await system.scheduler.observed(uid, "running")
        await system.caller.client.flush()
        reply = await system.caller.exec(kept, ExecRequest(op_id=ids.new(), shell="count /n"))
        assert reply.exit_code == 0
    reply = await system.caller.exec(kept, ExecRequest(op_id=ids.new(), shell="cat /n"))
    assert reply.stdout == b"ran\n" * RESTARTS
    assert len(system.edge.sandboxes) == RESTARTS + 1


async def test_what_happens_while_the_bus_is_away_is_told_later(system: Cluster) -> None:
    """(B02) ... also when the edge dies in between."""
    uid = await system.running(options={"die_after_s": 8.0, "die_cause": "oom"})
    other = await system.running(options={"die_after_s": 8.0, "die_cause": "runtime"})
    await system.nats.child.kill()
    await until(lambda: not system.edge.sandboxes)
    assert system.scheduler.seen(uid) == ["running"]
    await system.edge.kill()
    await system.edge.start()
    await asyncio.sleep(0.5)
    await system.nats.start()
    assert (await system.scheduler.observed(uid, "failed")).cause == "oom"
    assert (await system.scheduler.observed(other, "failed")).cause == "runtime"
    await back(system)


async def test_an_edge_without_a_bus_waits_for_it(tmp_path: Path) -> None:
    """(B02)"""
    port = free_port()
    async with cluster(tmp_path, DSEC_HEALTH_PORT=str(port)) as system:
        uid = await system.running()
        await system.edge.kill()
        await system.nats.child.kill()
        await system.edge.start()
        await until(lambda: port_open(port))
        report = await health(port)
        assert not report["ready"] and report["checks"]["bus"] != "ok"
        assert report["checks"]["journal"] == "ok"
        await system.nats.start()
        await back(system)
        await until_ready(port)
        reply = await system.caller.exec(uid, ExecRequest(op_id=ids.new(), argv=["true"]))
        assert reply.exit_code == 0


def port_open(port: int) -> bool:
    import socket

    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


async def health(port: int) -> dict:  # type: ignore[type-arg]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /health HTTP/1.1\r\n\r\n")
    body = (await reader.read()).split(b"\r\n\r\n", 1)[1]
    writer.close()
    return json.loads(body)  # type: ignore[no-any-return]


async def until_ready(port: int) -> None:
    async with asyncio.timeout(WAIT_S):
        while not (await health(port))["ready"]:
            await asyncio.sleep(0.05)


async def test_a_killed_edge_takes_its_sandboxes_up_again(system: Cluster) -> None:
    running = [await system.running() for _ in range(3)]
    paused = await system.running()
    for n, uid in enumerate(running):
        write = FileRequest(op_id=ids.new(), path="/kept", data=str(n).encode())
        assert (await system.caller.file(uid, "write", write)).error is None
    await system.scheduler.op("pause", paused)
    await system.scheduler.observed(paused, "paused")
    for epoch in (1, 2):
        await restart_edge(system)
        for n, uid in enumerate(running):
            info = await system.caller.info(uid, InfoRequest(op_id=ids.new()))
            assert (info.state, info.epoch) == ("running", epoch)
            read = FileRequest(op_id=ids.new(), path="/kept")
            assert (await system.caller.file(uid, "read", read)).data == str(n).encode()
        info = await system.caller.info(paused, InfoRequest(op_id=ids.new()))
        assert info.state == "paused"
    assert system.edge.sandboxes == {*running, paused}
    assert set(system.scheduler.joins[-1].live) == {*running, paused}


async def test_an_edge_killed_in_mid_start_starts_once(system: Cluster) -> None:
    uids = [ids.new() for _ in range(5)]
    await system.scheduler.start(uids, options={"start_delay_s": 6.0})
    await until(lambda: system.edge.sandboxes == set(uids))  # begun, not ended
    await system.edge.kill()
    assert all(system.scheduler.seen(uid) == [] for uid in uids)
    await system.edge.start()
    for uid in uids:
        await system.scheduler.observed(uid, "running")
    assert system.edge.sandboxes == set(uids)
    for uid in uids:
        reply = await system.caller.exec(uid, ExecRequest(op_id=ids.new(), argv=["true"]))
        assert reply.exit_code == 0
        await system.scheduler.op("stop", uid)
        await system.scheduler.observed(uid, "stopped")
        assert system.scheduler.seen(uid) == ["running", "stopped"]
    assert system.edge.sandboxes == set()


async def test_a_start_that_expired_while_the_edge_was_dead_is_cleaned_up(
    system: Cluster,
) -> None:
    uid = ids.new()
    await system.scheduler.start([uid], options={"start_delay_s": 60.0}, expires_s=8.0)
    await until(lambda: system.edge.sandboxes == {uid})
    await system.edge.kill()
    await asyncio.sleep(8.0)
    await system.edge.start()
    assert (await system.scheduler.observed(uid, "failed")).cause == "start_timeout"
    assert system.edge.sandboxes == set()


async def test_killing_the_edge_again_and_again_loses_no_start(system: Cluster) -> None:
    uids = [ids.new() for _ in range(40)]
    for n in range(0, 40, 10):
        await system.scheduler.start(uids[n : n + 10], options={"start_delay_s": 0.05})
        await asyncio.sleep(0.02 * (n // 10))
        await system.edge.kill()
        await system.edge.start()
    for uid in uids:
        await system.scheduler.observed(uid, "running")
    assert system.edge.sandboxes == set(uids)


async def test_a_stop_that_was_accepted_is_done_after_a_restart(system: Cluster) -> None:
    uid = await system.running(options={"stop_hang": True})
    await system.scheduler.op("stop", uid, cause="cancelled")
    await in_state(system, uid, "ending")
    assert system.scheduler.seen(uid) == ["running"]
    state = system.edge.folder / "drivers" / "fake" / uid / "state.msgpack"
    await system.edge.kill()
    state.unlink()  # the backend recovered from its hang: the sandbox is gone
    await system.edge.start()
    stopped = await system.scheduler.observed(uid, "stopped")
    assert (stopped.cause, stopped.generation) == ("cancelled", 2)
    assert system.edge.sandboxes == set()


async def in_state(system: Cluster, uid: str, state: str) -> None:
    """Returns once the edge says so of a sandbox."""
    async with asyncio.timeout(WAIT_S):
        while (await system.caller.info(uid, InfoRequest(op_id=ids.new()))).state != state:
            await asyncio.sleep(0.05)


async def test_a_sandbox_that_is_gone_after_a_restart_has_failed(system: Cluster) -> None:
    uid = await system.running(options={"recover_none": True})
    await restart_edge(system)
    failed = await system.scheduler.observed(uid, "failed")
    assert failed.cause == "runtime"
    assert system.edge.sandboxes == set()
    reply = await system.caller.exec(uid, ExecRequest(op_id=ids.new(), argv=["true"]))
    assert reply.error is not None and reply.error.code == "not_found"


async def test_a_tombstone_outlives_the_edge(system: Cluster) -> None:
    uid = ids.new()
    await system.scheduler.op("stop", uid)
    await system.scheduler.observed(uid, "unknown")
    await restart_edge(system)
    await system.scheduler.start([uid], generation=1)
    await until(lambda: len(system.scheduler.seen(uid)) == 2)
    assert system.edge.sandboxes == set()


async def test_an_orderly_end_leaves_sandboxes_alone(system: Cluster) -> None:
    uid = await system.running()
    request = ExecRequest(op_id=ids.new(), shell="echo begun; hang", stream=True)
    hanging = await system.caller.call(uid, "exec", request)
    await until(hanging.data)
    assert await system.edge.kill(signal.SIGTERM) == 0
    reply = decode(await asyncio.wait_for(hanging.final, WAIT_S), ExecReply)
    assert reply.error is not None and reply.error.is_infra
    assert system.edge.sandboxes == {uid}
    await system.edge.start()
    await back(system)
    reply = await system.caller.exec(uid, ExecRequest(op_id=ids.new(), argv=["true"]))
    assert reply.exit_code == 0


async def test_a_damaged_journal_is_moved_aside(system: Cluster) -> None:
    uid = await system.running()
    await system.edge.kill()
    journal = system.edge.folder / "journal.db"
    for suffix in ("-wal", "-shm"):
        journal.with_name(journal.name + suffix).unlink(missing_ok=True)
    journal.write_bytes(b"this is no database" * 1000)
    await system.edge.start()
    await back(system)
    assert system.edge.sandboxes == set()  # nobody knows it: it was a leftover
    assert list(system.edge.folder.glob("journal.db.damaged-*"))
    assert "is damaged" in (system.edge.folder.parent / "edge.log").read_text()
    fresh = await system.running()
    assert system.edge.sandboxes == {fresh} and uid != fresh


async def test_two_edges_do_not_share_a_folder(system: Cluster) -> None:
    uid = await system.running()
    first = system.edge.process
    await system.edge.start()
    assert system.edge.process is not None and system.edge.process is not first
    assert await system.edge.process.wait() != 0
    system.edge.process = first
    assert system.edge.sandboxes == {uid}


async def test_a_connection_ended_for_good_is_made_anew(system: Cluster, tmp_path: Path) -> None:
    """What a server does when rights expire; the sandboxes live on."""
    uid = await system.running()
    await system.edge.kill(signal.SIGTERM)
    env = {k.removeprefix("DSEC_").lower(): v for k, v in system.edge.env.items()}
    settings = Settings(
        nats_url=env["nats_url"], nats_user=env["nats_user"], node=env["node"],
        nats_password=env["nats_password"], drivers="fake", memory_floor_mb=1,
        state_dir=str(system.edge.folder), store_url=env["store_url"],
        pressure_memory=1.1, pressure_io=1.1, pressure_cpu=1.1,
    )  # fmt: skip
    edge, stop = Edge(settings), asyncio.Event()
    running = asyncio.ensure_future(edge.run(stop))
    try:
        await back(system)
        first = edge.link.bus
        await first.client.close()
        await until(lambda: len(system.scheduler.joins) >= 3)
        assert edge.link.bus is not first
        reply = await system.caller.exec(uid, ExecRequest(op_id=ids.new(), argv=["true"]))
        assert reply.exit_code == 0
        other = ids.new()
        await system.scheduler.start([other])
        await system.scheduler.observed(other, "running")
    finally:
        stop.set()
        await running
