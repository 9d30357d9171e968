"""One request for a job of tens of thousands of sandboxes: sizes, memory, who else waits."""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from nats.aio.msg import Msg

from schemas.base import ErrorReply, decode, encode
from schemas.sandbox import SandboxPage, SandboxQuery
from schemas.subjects import rpc
from services.scheduler import ops
from shared import ids
from tests.integration.scheduler.conftest import World
from tests.integration.scheduler.world import SimEdge, Trainer, eventually

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]

COUNT = 20_000
NODES = 4
WITHIN_S = 120.0
MESSAGE_BYTES = 1 << 20
"""What a NATS server takes that nobody has configured."""
MEMORY_MB = 600
"""Of the scheduler, its test and what both keep of all results."""

_SEED = """
    insert into sandbox (uid, project, state, generation, placed_generation, node, request_id,
        index, spec_idx, principal, backend, cores, memory_mb, job, labels, is_infra, message,
        tried_nodes, expires_at, created_at, running_at, changed_at)
    select u, 'lab', 'running', 1, 1, n, $3, i - 1, 0, 'p', 'fake', 0.001, 1, 'large', '{}',
        false, '', '', now() + interval '1 hour', now(), now(), now()
    from unnest($1::text[], $2::text[]) with ordinality as t(u, n, i)
"""


class Sizes:
    """The largest message of each kind that went over the bus."""

    def __init__(self) -> None:
        self.bytes: dict[str, int] = {}

    async def see(self, msg: Msg) -> None:
        kind = msg.subject.split(".")[0]
        self.bytes[kind] = max(self.bytes.get(kind, 0), len(msg.data))

    async def listen(self, trainer: Trainer) -> None:
        """From now on: commands, what edges tell, answers."""
        for subject in ("dsec.cmd.>", "dsec.evt.v1.edge.>", f"{trainer.inbox}.>"):
            await trainer.nc.subscribe(subject, cb=self.see)
        await trainer.nc.flush()


@asynccontextmanager
async def large_job(world: World) -> AsyncIterator[list[SimEdge]]:
    """Sandboxes that run, as if they had been created."""
    await world.scheduler(silence_s=60.0, lost_grace_s=60.0, op_again_s=60.0)
    edges = [await world.edge(f"n{i}", room=2 * COUNT) for i in range(NODES)]
    request = ids.new()
    uids = [ids.item_uid(request, i) for i in range(COUNT)]
    nodes = [edges[i % NODES].node for i in range(COUNT)]
    await world.sql(
        "insert into request (request_id, project, principal, total) values ($1, 'lab', 'p', $2)",
        request, COUNT,
    )  # fmt: skip
    await world.sql(_SEED, uids, nodes, request)
    for edge in edges:
        edge.live = {u: "running" for u, n in zip(uids, nodes, strict=True) if n == edge.node}
        await world.sql(
            "update node set committed_cores = $2 * 0.001, committed_memory_mb = $2, "
            "committed_sandboxes = $2 where id = $1", edge.node, len(edge.live),
        )  # fmt: skip
    yield edges


async def test_one_request_is_enough_for_a_large_job(world: World) -> None:
    async with large_job(world) as edges:
        trainer, sizes = await world.trainer(hears=False), Sizes()
        await sizes.listen(trainer)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for verb, state in (("pause", "paused"), ("stop", "stopped")):
            asked = await trainer.op(verb, [], job="large")
            reply = await eventually(
                lambda a=asked: trainer.op_replies.get(a), within_s=WITHIN_S, what=verb
            )
            assert len(reply.results) == COUNT
            assert {r.state for r in reply.results} == {state}
            assert await listed(trainer) == {state: COUNT}
        grown_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        assert grown_mb < MEMORY_MB
        assert set(sizes.bytes) == {"dsec", "_INBOX"} and max(sizes.bytes.values()) < MESSAGE_BYTES
        assert await world.committed() == {e.node: 0 for e in edges}


async def listed(trainer: Trainer) -> dict[str, int]:
    """The job's sandboxes by state, page by page."""
    found: Counter[str] = Counter()
    after = None
    while True:
        query = SandboxQuery(project="lab", job="large", after=after, limit=1000)
        answer = await trainer.nc.request(rpc("scheduler", "sandboxes"), encode(query), timeout=60)
        assert len(answer.data) < MESSAGE_BYTES
        page = decode(answer.data, SandboxPage)
        found.update(s.state for s in page.sandboxes)
        after = page.next
        if after is None:
            return dict(found)


async def test_a_job_that_is_too_large_for_one_request_is_refused_as_a_whole(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "MAX_SELECTED", 4)
    await world.scheduler()
    edge = await world.edge("n1")
    trainer = await world.trainer()
    uids = await trainer.create(5, job="large", labels={"part": "1"})
    await trainer.settled(uids)
    inbox: list[bytes] = []

    async def refused(msg: Msg) -> None:
        inbox.append(msg.data)

    trainer.inbox = trainer.nc.new_inbox()
    await trainer.nc.subscribe(f"{trainer.inbox}.op", cb=refused)
    await trainer.nc.flush()
    await trainer.op("pause", [], job="large")
    await eventually(lambda: inbox, within_s=WITHIN_S)
    error = decode(inbox[0], ErrorReply).error
    assert (error.code, error.field) == ("invalid_request", "job")
    assert "more than 4" in error.message
    assert set(edge.live.values()) == {"running"} and not edge.ops
