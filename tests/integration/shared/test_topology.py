"""The map and the server agree, or the start says where they do not."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
from nats.js.api import ConsumerConfig, StreamConfig

from schemas.streams import DURABLES, EDGE_DURABLE, STREAMS, durable
from shared import topology
from shared.bus import Bus, Outgoing
from shared.errors import Internal, Unavailable
from tests.integration.conftest import Stack

pytestmark = pytest.mark.integration


async def test_two_declarations_at_once_make_one_topology(bus: Bus) -> None:
    await asyncio.gather(*(topology.declare(bus.js) for _ in range(3)))
    names = {info.config.name for info in await bus.js.streams_info()}
    assert {stream.name for stream in STREAMS} <= names
    for made in DURABLES:
        info = await bus.js.consumer_info(made.stream, made.name)
        assert info.config.ack_wait == made.ack_wait_s, "in seconds on both sides (B07)"


@pytest.mark.parametrize(
    ("field", "value"),
    [("ack_wait", 0.03), ("max_ack_pending", 7), ("max_deliver", 3)],
)
async def test_a_changed_durable_is_named_at_the_start(
    bus: Bus, field: str, value: float
) -> None:
    """(B07) A wrong unit shows as a difference, not as a redelivery storm."""
    await topology.declare(bus.js)
    made = durable("audit_violations")
    right = topology.consumer_config(made)
    wrong: ConsumerConfig = dataclasses.replace(right, **{field: value})
    await bus.js.delete_consumer(made.stream, made.name)
    await bus.js.add_consumer(made.stream, wrong)
    try:
        with pytest.raises(Internal, match=rf"audit_violations\.{field} is "):
            await topology.verify(bus.js)
    finally:
        await bus.js.delete_consumer(made.stream, made.name)
        await topology.declare(bus.js)


async def test_a_changed_stream_is_named_at_the_start(bus: Bus) -> None:
    await topology.declare(bus.js)
    stream = next(s for s in STREAMS if s.name == "DSEC_AUDIT")
    right = topology.stream_config(stream)
    wrong: StreamConfig = dataclasses.replace(right, max_age=60, duplicate_window=30)
    await bus.js.update_stream(wrong)
    try:
        with pytest.raises(Internal, match=r"DSEC_AUDIT\.max_age is 60"):
            await topology.verify(bus.js)
    finally:
        await bus.js.update_stream(right)
    await topology.verify(bus.js)


async def test_an_upgrade_changes_what_differs_and_keeps_what_is_stored(bus: Bus) -> None:
    await topology.declare(bus.js)
    stream = next(s for s in STREAMS if s.name == "DSEC_AUDIT")
    made = durable("audit_violations")
    older = topology.stream_config(stream)
    await bus.js.update_stream(dataclasses.replace(older, max_age=60, duplicate_window=30))
    config = topology.consumer_config(made)
    await bus.js.add_consumer(made.stream, dataclasses.replace(config, ack_wait=45))
    changed = await topology.upgrade(bus.js)
    assert [line.split()[0] for line in changed] == [
        "DSEC_AUDIT.max_age", "DSEC_AUDIT.duplicate_window", "audit_violations.ack_wait",
    ]  # fmt: skip
    await topology.verify(bus.js)
    assert await topology.upgrade(bus.js) == []


async def test_streams_that_are_gone_are_made_again(own_stack: Stack) -> None:
    """(B09) A server that comes back empty: a publish is a typed error, then works."""
    import shutil

    bus = Bus(own_stack.settings(), "test")
    await bus.start()
    await topology.declare(bus.js)
    message = Outgoing("dsec.cmd.v1.sandbox.op.k", b"{}")
    await bus.store([message])
    await own_stack.do(own_stack.infra.kill("nats"))
    shutil.rmtree(own_stack.infra.state_dir / "jetstream")
    await own_stack.do(own_stack.infra.restart("nats"))
    async with asyncio.timeout(60):
        while not bus.client.is_connected:
            await asyncio.sleep(0.05)
    with pytest.raises(Unavailable):
        await bus.store([message])
    await topology.declare(bus.js)
    await bus.store([message])
    assert (await bus.js.stream_info("DSEC_CMD")).state.messages == 1
    await bus.close()


async def test_a_nodes_durable_takes_only_its_own_commands(bus: Bus) -> None:
    await topology.declare(bus.js)
    for node in ("n1", "n2"):
        await topology.declare_durable(bus.js, EDGE_DURABLE, node)
    await bus.store([Outgoing("dsec.cmd.v1.edge.stop.n1", b"{}", msg_id="topology-n1")])
    info = {n: await bus.js.consumer_info("DSEC_CMD", f"edge_{n}") for n in ("n1", "n2")}
    assert (info["n1"].num_pending, info["n2"].num_pending) == (1, 0)
    for node in ("n1", "n2"):
        await bus.js.delete_consumer("DSEC_CMD", f"edge_{node}")


async def test_stored_messages_survive_a_killed_server(own_stack: Stack) -> None:
    """(B09) File storage."""
    bus = Bus(own_stack.settings(), "test")
    await bus.start()
    await topology.declare(bus.js)
    await bus.store([Outgoing(f"dsec.cmd.v1.sandbox.op.k{i}", b"{}") for i in range(100)])
    await own_stack.do(own_stack.infra.kill("nats"))
    await own_stack.do(own_stack.infra.restart("nats"))
    async with asyncio.timeout(60):
        while not bus.client.is_connected:
            await asyncio.sleep(0.05)
    assert (await bus.js.stream_info("DSEC_CMD")).state.messages == 100
    await topology.verify(bus.js)
    await bus.close()
