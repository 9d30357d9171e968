"""What is told of a node's trajectories, whatever is in the way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from schemas.base import decode
from schemas.exec import ExecRequest
from schemas.trajectory import TrajectoryRecord, TrajectoryRecords, TrajectoryRequest
from services.edge.door.calls import Call
from services.edge.door.door import Door
from services.edge.journal import records, trail
from services.edge.journal.execs import Execs
from services.edge.journal.fitting import room
from services.edge.journal.journal import Journal
from services.edge.journal.logged import Logged, Numbers
from services.edge.journal.outputs import Outputs, Room
from services.edge.journal.trail import Trail
from shared import ids
from shared.bus import Outgoing
from shared.clock import FakeClock
from shared.errors import InvalidRequest, Unavailable

UID = ids.derived("sandbox")
CALL = Call("team", "n1", UID, "exec", "p")


class Bus:
    """Takes records, or does not."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.most_bytes = 8 << 20
        self.told: list[TrajectoryRecord] = []

    async def store(self, messages: list[Outgoing]) -> None:
        if self.error is not None:
            raise self.error
        for message in messages:
            if len(message.data) > self.most_bytes:
                raise InvalidRequest("too large", field="payload")
            self.told += decode(message.data, TrajectoryRecords).records


class Node:
    """The parts of an edge that make records."""

    def __init__(self, folder: Path) -> None:
        self.bus = Bus()
        self.journal = Journal(folder / "j.db")
        self.execs = Execs(self.journal)
        self.journal.start()
        self.sandbox: Any = SimpleNamespace(uid=UID, numbers=Numbers(0))
        link: Any = SimpleNamespace(bus=self.bus, payload_limit=lambda: self.bus.most_bytes)
        self.outputs = Outputs(folder, node="n1", link=link, room=Room(5_000, 8_000))
        self.trail = Trail(
            node="n1", link=link, journal=self.journal, execs=self.execs, outputs=self.outputs,
            output_bytes=1_000, request_bytes=5_000,
        )  # fmt: skip

    async def begin(self, shell: str = "true") -> Any:
        request = ExecRequest(op_id=ids.new(), shell=shell)
        op: Any = SimpleNamespace(
            call=CALL, op_id=request.op_id, hash=b"h" * 32, logged=Logged(0)
        )
        await self.execs.begin(
            UID, op.op_id, lambda: self.trail.claim(op, self.sandbox, request, 1.0)
        )
        self.trail.begun(op)
        return op

    def end(self, op: Any, reply: bytes = b'{"exit_code":0}') -> None:
        changes, done = self.execs.ended(UID, op.op_id, reply, 2.0)
        self.journal.post(*changes, done=done)
        self.trail.ended(op, reply, 2.0)

    async def untold(self) -> list[int]:
        self.execs.tell()
        return [seq for _, seq, *_ in await self.journal.run(lambda db: list(records.untold(db)))]

    async def close(self) -> None:
        await self.trail.close()
        await self.journal.close()
        self.execs.close()


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    made = Node(tmp_path)
    yield made
    await made.close()


async def test_an_intent_and_its_result_are_told_once_as_one(node: Node) -> None:
    first, second = await node.begin(), await node.begin()
    node.end(first)
    await node.trail.flush()
    assert [(r.seq, r.ended_at) for r in node.bus.told] == [(1, 2.0), (2, None)]
    assert await node.untold() == []
    node.end(second)
    assert await node.untold() == [2]
    await node.trail.flush()
    assert [(r.seq, r.ended_at) for r in node.bus.told[2:]] == [(2, 2.0)]
    assert await node.untold() == []


async def test_before_an_end_is_told_its_last_operations_are(node: Node) -> None:
    """As far as they end, too, within a bound; others' records go along."""
    op, other = await node.begin(), await node.begin()

    async def ends() -> None:
        await asyncio.sleep(0.05)
        node.end(op)

    await node.trail.settle(UID, [asyncio.create_task(ends())])
    assert [(r.seq, r.ended_at) for r in node.bus.told] == [(1, 2.0), (2, None)]
    node.end(other)
    await node.trail.settle("another", [])
    assert len(node.bus.told) == 2, "nobody waits for what is not its own"


async def test_an_end_waits_for_no_bus_that_is_away_and_no_operation_that_stays(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trail, "SETTLE_S", 0.05)
    node.end(await node.begin())
    endless = asyncio.create_task(asyncio.sleep(600))
    await node.trail.settle(UID, [endless])
    assert node.bus.told == [] and endless.cancel(), "it was let be"
    node.bus.error = Unavailable("away")
    await node.trail.settle(UID, [])
    node.bus.error = None
    await node.trail.settle(UID, [])
    assert [r.seq for r in node.bus.told] == [1]


async def test_what_does_not_fit_into_memory_is_told_later(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trail, "MAX_WAITING_BYTES", 4_000)
    monkeypatch.setattr(trail, "LINGER_S", 0.01)
    node.bus.error = Unavailable("away")
    for _ in range(40):
        node.end(await node.begin("x" * 500))
    assert node.trail._waiting_bytes < 8_000
    node.bus.error = None
    node.trail.start()
    async with asyncio.timeout(60):
        while await node.untold():
            await asyncio.sleep(0.02)
    assert sorted({r.seq for r in node.bus.told if r.ended_at}) == list(range(1, 41))


async def test_what_found_no_room_while_the_journal_was_read_is_told_too(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trail, "LINGER_S", 0.01)
    run = node.journal.run

    async def meanwhile(work: Any) -> Any:
        found = await run(work)
        if work is trail._untold:
            monkeypatch.setattr(node.journal, "run", run)
            monkeypatch.setattr(trail, "MAX_WAITING_BYTES", 0)
            node.end(await node.begin())
            monkeypatch.undo()
            monkeypatch.setattr(trail, "LINGER_S", 0.01)
        return found

    monkeypatch.setattr(node.journal, "run", meanwhile)
    node.trail.start()
    async with asyncio.timeout(60):
        while not any(r.ended_at for r in node.bus.told):
            await asyncio.sleep(0.02)


async def test_an_earlier_process_leaves_nothing_untold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trail, "LINGER_S", 0.01)
    first = Node(tmp_path)
    first.end(await first.begin("first"))
    await first.begin("second")
    await first.close()
    again = Node(tmp_path)
    again.trail.start()
    async with asyncio.timeout(60):
        while len(again.bus.told) < 2:
            await asyncio.sleep(0.02)
    assert [(r.seq, r.request and r.request["shell"]) for r in again.bus.told] == [
        (1, "first"), (2, "second"),
    ]  # fmt: skip
    await again.close()


async def test_a_record_that_the_bus_refuses_holds_up_no_other(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    node.end(await node.begin())
    node.bus.error = InvalidRequest("too large")
    await node.trail.flush()
    node.bus.error = None
    node.end(await node.begin())
    await node.trail.flush()
    assert [r.seq for r in node.bus.told] == [2]
    assert "is lost: too large" in caplog.text
    assert node.trail.counts == {"lost": 1}


async def test_a_server_that_takes_less_gets_the_records_in_parts(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = (300, 300, 4_500, 300, 300, 300)
    begun = [await node.begin("x" * size) for size in sizes]
    node.bus.most_bytes = 4_000
    for op in begun:
        node.end(op)
    await node.trail.flush()
    told = {r.seq: r for r in node.bus.told}
    assert sorted(told) == [1, 2, 3, 4, 5, 6] and len(node.bus.told) == 6
    assert told[3].request is None and told[3].cut > 4_500
    assert told[3].reply == {"exit_code": 0} and told[2].cut == 0
    assert caplog.text.count("is told in part: too large") == 1
    assert node.trail.counts == {"cut": 1}
    assert await node.untold() == []


async def test_an_output_is_kept_in_the_measure_of_the_buss_messages(node: Node) -> None:
    """What is more goes as a whole, so that nothing is lost of it."""
    node.bus.most_bytes = 6_000
    node.outputs.folder.mkdir()
    op = await node.begin()
    request_bytes = len(bytes(op.logged.record.request))
    op.logged.add("stdout", b"x" * 3_000)
    assert len(op.logged.kept("stdout")) == room(6_000, request_bytes) < 1_000
    (whole,) = await node.outputs.seal(op.logged.spooled())
    assert whole.bytes == 3_000


async def test_what_did_not_begin_keeps_its_number_and_frees_its_id(node: Node) -> None:
    op = await node.begin()
    refusal = b'{"error":{"code":"unavailable"}}'
    node.journal.post(*node.execs.dropped(UID, op.op_id, refusal, 2.0)[0])
    node.trail.ended(op, refusal, 2.0)
    assert await node.execs.find(UID, op.op_id) is None
    await node.trail.flush()
    asked: Any = SimpleNamespace(op_id=ids.new())
    page = await node.trail.page(node.sandbox, TrajectoryRequest(op_id=asked.op_id), asked)
    assert [(r.seq, r.op_id, bytes(r.reply)) for r in page.records] == [(1, op.op_id, refusal)]


async def test_a_request_that_is_too_large_is_named_by_its_size(node: Node) -> None:
    await node.begin("x" * 5_000)
    await node.trail.flush()
    assert node.bus.told[0].request is None
    assert node.bus.told[0].cut > 5_000


def test_numbers_have_no_hole() -> None:
    numbers = Numbers(7)
    first, second = numbers.next(), numbers.next()
    numbers.unused(first)  # another one came after it
    assert (first, second, numbers.next()) == (8, 9, 10)
    numbers.unused(10)
    assert numbers.next() == 10


@pytest.mark.parametrize("size", [0, 10, 1_000, 1_001, 5_000, 100_000])
@pytest.mark.parametrize("chunk", [1, 7, 400, 4_096])
def test_head_and_tail_of_an_output_are_kept(size: int, chunk: int) -> None:
    data = bytes(n % 251 for n in range(size))
    logged = Logged(1, limit=1_000)
    for at in range(0, size, chunk):
        logged.add("stdout", data[at : at + chunk])
    kept = logged.kept("stdout")
    assert kept == (data if size <= 1_000 else data[:500] + data[-500:])
    assert logged.kept("stderr") == b""


async def test_a_cancelled_intent_keeps_its_number_and_its_end(node: Node) -> None:
    """The journal was asked to keep it and will: the number is nobody else's."""
    door = object.__new__(Door)
    door._execs, door._trail, door._clock = node.execs, node.trail, FakeClock()
    claims, node.execs._claims = node.execs._claims, None  # every intent waits for its commit
    request = ExecRequest(op_id=ids.new(), shell="true")
    op: Any = SimpleNamespace(
        call=CALL, op_id=request.op_id, hash=b"h" * 32, logged=Logged(0), claimed=False,
        again=False, repeated=False,
    )  # fmt: skip
    begun = asyncio.ensure_future(door._known(op, node.sandbox, request))
    while not op.logged.seq and not begun.done():
        await asyncio.sleep(0)
    begun.cancel()
    with pytest.raises(asyncio.CancelledError):
        await begun
    assert op.claimed
    node.end(op)
    node.execs._claims = claims
    assert (await node.begin()).logged.seq == 2
    await node.trail.flush()
    assert [(r.seq, r.ended_at) for r in node.bus.told] == [(1, 2.0), (2, None)]
    assert (await node.execs.find(UID, op.op_id)).reply is not None  # type: ignore[union-attr]
