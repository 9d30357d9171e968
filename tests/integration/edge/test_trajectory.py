"""The edge's end of the trajectory log: records of a node, and how they get out."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import msgspec
import pytest
from nats.aio.msg import Msg

from schemas.base import Ok, decode, encode
from schemas.exec import ExecReply, ExecRequest, FileRequest, InfoRequest
from schemas.subjects import trj
from schemas.trajectory import (
    NOTE_BYTES,
    NoteReply,
    NoteRequest,
    OutputPiece,
    TrajectoryPage,
    TrajectoryRecord,
    TrajectoryRecords,
    TrajectoryRequest,
    output_of,
)
from shared import ids
from tests.integration.edge.cluster import NODE, WAIT_S, Cluster, until


class Told:
    """What the edge tells the services, newest state of each record."""

    def __init__(self) -> None:
        self.records: dict[tuple[str, int], TrajectoryRecord] = {}
        self.states: list[tuple[str, int, bool]] = []
        self.pieces: dict[int, OutputPiece] = {}

    async def keep(self, msg: Msg) -> None:
        piece = decode(msg.data, OutputPiece)
        self.pieces[piece.piece] = piece  # one whose answer was late comes again
        await msg.respond(encode(Ok()))

    async def take(self, msg: Msg) -> None:
        message = decode(msg.data, TrajectoryRecords)
        assert msg.subject.rpartition(".")[2] == message.node
        for record in message.records:
            self.records[record.uid, record.seq] = record
            self.states.append((record.uid, record.seq, record.ended_at is not None))

    def ended(self, uid: str) -> list[int]:
        return sorted(seq for (u, seq), r in self.records.items() if u == uid and r.ended_at)


@pytest.fixture
async def told(system: Cluster) -> Told:
    made = Told()
    await system.scheduler.bus.client.subscribe("dsec.trj.v1.*", cb=made.take)
    await system.scheduler.bus.client.subscribe(output_of("*"), cb=made.keep)
    await system.scheduler.bus.client.flush()
    return made


def command(shell: str, **more: Any) -> ExecRequest:
    return ExecRequest(op_id=ids.new(), shell=shell, **more)


async def page(system: Cluster, uid: str, **more: Any) -> TrajectoryPage:
    request = TrajectoryRequest(op_id=ids.new(), **more)
    answer = await system.caller.call(uid, "trajectory", request)
    return decode(await asyncio.wait_for(answer.final, WAIT_S), TrajectoryPage)


async def restarted(system: Cluster) -> None:
    joins = len(system.scheduler.joins)
    await system.edge.kill()
    await system.edge.start()
    await until(lambda: len(system.scheduler.joins) > joins)


async def test_changes_have_a_record_and_looks_only_where_a_script_counts_them(
    system: Cluster, told: Told
) -> None:
    uid = await system.running()
    await system.caller.exec(uid, command("echo out; exit 3"))
    new = ids.new
    requests = [
        ("mkdir", FileRequest(op_id=new(), path="/tmp/d")),
        ("write", FileRequest(op_id=new(), path="/tmp/d/f", data=b"x")),
        ("read", FileRequest(op_id=new(), path="/tmp/d/f")),
        ("stat", FileRequest(op_id=new(), path="/tmp/d/f", lane="main", step=4)),
        ("move", FileRequest(op_id=new(), path="/tmp/none", target="/tmp/g")),
        ("remove", FileRequest(op_id=new(), path="/tmp/d/f")),
    ]
    for verb, request in requests:
        await system.caller.file(uid, verb, request)
    found = await page(system, uid)
    assert [(r.seq, r.verb) for r in found.records] == [
        (1, "exec"), (2, "file_mkdir"), (3, "file_write"), (4, "file_stat"), (5, "file_move"),
        (6, "file_remove"),
    ]  # fmt: skip
    assert (found.last, found.more) == (6, False)
    first, stat, move = found.records[0], found.records[3], found.records[4]
    assert first.reply is not None and first.reply["exit_code"] == 3
    assert (stat.lane, stat.step) == ("main", 4)
    assert move.reply is not None and move.reply["error"]["code"] == "not_found"
    assert all(r.ended_at is not None and r.at <= r.ended_at for r in found.records)
    await until(lambda: told.ended(uid) == [1, 2, 3, 4, 5, 6])
    assert told.records[uid, 1] == first
    # with their results, each once; of one that took long the intent was told before
    assert sum(1 for of, _, ended in told.states if of == uid and ended) == 6
    assert len(told.states) == len(set(told.states))


async def test_pages_follow_each_other(system: Cluster) -> None:
    uid = await system.running()
    for _ in range(5):
        await system.caller.exec(uid, command("true"))
    first = await page(system, uid, limit=2)
    assert ([r.seq for r in first.records], first.more) == ([1, 2], True)
    rest = await page(system, uid, after=2, limit=3)
    assert ([r.seq for r in rest.records], rest.more, rest.last) == ([3, 4, 5], False, 5)


async def test_an_intent_is_told_before_its_result(system: Cluster, told: Told) -> None:
    uid = await system.running()
    request = command("sleep 60")
    await system.caller.call(uid, "exec", request)
    await until(lambda: (uid, 1) in told.records)
    assert told.records[uid, 1].ended_at is None
    await system.caller.io(uid, request.op_id, "c")
    await until(lambda: told.ended(uid) == [1])
    assert told.records[uid, 1].reply is not None
    assert told.records[uid, 1].reply["signal"] == "KILL"


async def test_numbers_go_on_and_nothing_is_lost_when_the_edge_is_killed(
    system: Cluster, told: Told
) -> None:
    uid = await system.running()
    large = command("true " + "x" * 3_000 + "")
    for request in (command("true"), large):
        await system.caller.exec(uid, request)
    await system.caller.call(uid, "exec", command("sleep 60"))
    await until_begun(system, uid, 3)
    await restarted(system)
    await system.caller.exec(uid, command("true"))
    await until(lambda: told.ended(uid) == [1, 2, 4] and (uid, 3) in told.records)
    assert told.records[uid, 3].ended_at is None
    found = await page(system, uid)
    assert [(r.seq, r.ended_at is None) for r in found.records] == [
        (1, False), (2, False), (3, True), (4, False),
    ]  # fmt: skip
    assert found.records[1].request is not None
    assert found.records[1].request["shell"] == large.shell


async def until_begun(system: Cluster, uid: str, seq: int) -> None:
    async with asyncio.timeout(WAIT_S):
        while (await page(system, uid)).last < seq:
            await asyncio.sleep(0.05)


async def noted(system: Cluster, uid: str, request: NoteRequest) -> NoteReply:
    answer = await system.caller.call(uid, "note", request)
    return decode(await asyncio.wait_for(answer.final, WAIT_S), NoteReply)


def note(op_id: str, data: bytes, *, step: int = 1) -> NoteRequest:
    about = hashlib.sha256(b"asked").hexdigest()
    return NoteRequest(op_id=op_id, lane="main", about=about, data=data, step=step)


async def test_a_note_outlives_a_kill_right_after_its_answer(system: Cluster, told: Told) -> None:
    """Whole, however long; the first one at an id stays, also for the next process."""
    uid = await system.running()
    one, two = note(ids.new(), b"a" * NOTE_BYTES), note(ids.new(), b"b", step=2)
    assert (await noted(system, uid, one)).seq == 1
    assert (await noted(system, uid, two)).seq == 2
    await restarted(system)
    for request, seq in ((one, 1), (two, 2)):
        again = await noted(system, uid, request)
        assert (again.error, again.seq) == (None, seq)
    other = await noted(system, uid, note(two.op_id, b"c", step=2))
    assert other.error is not None
    assert (other.error.code, other.error.field) == ("conflict", "op_id")
    (first,), (second,) = (
        (await page(system, uid, limit=1)).records, (await page(system, uid, after=1)).records
    )  # fmt: skip
    for record, request in ((first, one), (second, two)):
        assert record.request is not None and record.ended_at is not None
        assert msgspec.convert(record.request, NoteRequest) == request
    await until(lambda: told.ended(uid) == [1, 2])


async def test_a_note_whose_service_was_killed_before_the_answer_is_kept_when_it_is_asked_again(
    system: Cluster, told: Told
) -> None:
    uid = await system.running()
    request = note(ids.new(), b"d" * 5_000)
    await system.caller.call(uid, "note", request)
    await restarted(system)
    assert (await noted(system, uid, request)).error is None
    (record,) = (await page(system, uid)).records
    assert msgspec.convert(record.request, NoteRequest) == request
    await until(lambda: told.ended(uid) == [1])


async def test_a_note_leaves_a_paused_sandbox_alone(system: Cluster) -> None:
    uid = await system.running()
    await system.scheduler.op("pause", uid)
    await system.scheduler.observed(uid, "paused")
    assert (await noted(system, uid, note(ids.new(), b"x"))).seq == 1
    info = await system.caller.info(uid, InfoRequest(op_id=ids.new()))
    assert info.state == "paused"


async def test_what_ended_with_its_sandbox_is_told_too(system: Cluster, told: Told) -> None:
    uid = await system.running()
    await system.caller.exec(uid, command("true"))
    await system.caller.call(uid, "exec", command("sleep 60"))
    await until_begun(system, uid, 2)
    await system.scheduler.op("stop", uid)
    await system.scheduler.observed(uid, "stopped")
    # who hears of the end finds the log whole
    last = await system.scheduler.bus.js.get_last_msg("DSEC_TRJ", trj(NODE))
    records = decode(last.data or b"", TrajectoryRecords).records
    assert (uid, 2) in {(r.uid, r.seq) for r in records if r.ended_at}
    await until(lambda: told.ended(uid) == [1, 2])
    reply = told.records[uid, 2].reply
    assert reply is not None and reply["error"]["code"] == "sandbox_died"


async def test_a_refusal_keeps_its_record_and_the_operation_may_begin(
    system: Cluster, told: Told
) -> None:
    """Of the same operation only the second one ran."""
    uid = await system.running()
    request = command("echo once >> /tmp/n; cat /tmp/n")
    assert (await system.caller.exec(uid, request)).stdout == b"once\n"
    again = await system.caller.exec(uid, request)
    assert (again.stdout, again.seq) == (b"once\n", 1)
    assert (await page(system, uid)).last == 1


async def test_of_large_output_head_and_tail_are_kept_and_large_requests_are_named(
    system: Cluster, told: Told
) -> None:
    uid = await system.running()
    size, keep = 3_000_000, 1 << 20
    request = command(f"bytes {size}", stream=True)
    answer = await system.caller.call(uid, "exec", request)
    await asyncio.wait_for(answer.final, WAIT_S)
    script = "true " + "x" * 300_000
    await system.caller.exec(uid, command(script))
    full = await page(system, uid)
    assert full.more  # a page has a bound
    (first,), (second,) = full.records, (await page(system, uid, after=1)).records
    kept = msgspec.convert(first.reply, ExecReply)
    assert (len(kept.stdout), kept.truncated) == (keep, (size - keep, 0))
    assert answer.data().startswith(kept.stdout[: keep // 2])
    assert answer.data().endswith(kept.stdout[-keep // 2 :])
    assert second.request is None and second.cut > 300_000
    (whole,) = kept.whole
    assert (whole.stream, whole.bytes) == ("stdout", size)
    await until(lambda: sum(len(p.data) for p in told.pieces.values()) == size)
    pieces = sorted(told.pieces.items())
    digest = hashlib.sha256(b"".join(p.data for _, p in pieces)).hexdigest()
    assert digest == whole.sha256
