"""The services' trajectory log on a real database."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import asyncpg
import msgspec
import pytest
from msgspec.structs import replace

from schemas.base import encode
from schemas.subjects import trj
from schemas.trajectory import OutputPiece, OutputQuery, TrajectoryQuery, output_of
from services.audit.outputs import ROW_BYTES, Outputs
from services.audit.trajectory import HOUR_S, Trajectories
from shared import ids
from shared.bus import Incoming
from shared.db import Database
from shared.errors import InvalidRequest, NotFound
from shared.trajectory import Page, Record, Records

pytestmark = pytest.mark.integration

UID = ids.derived("sandbox")
NOBODY: Any = None


@pytest.fixture
async def dsn(dsn_of: Callable[[str], str], admin_dsn: str) -> str:
    made = dsn_of("audit")
    admin = await asyncpg.connect(admin_dsn)
    await admin.execute("truncate audit.trajectory, audit.trajectory_output, audit.trajectory_hour")
    await admin.close()
    return made


@pytest.fixture
async def db(dsn: str) -> AsyncIterator[Database]:
    made = Database(dsn, "audit")
    yield made
    await made.close()


@pytest.fixture
def log(db: Database) -> Trajectories:
    return Trajectories(db, keep_s=10 * HOUR_S, max_bytes=1 << 40)


def record(seq: int, *, ended: bool = True, output: str = "", uid: str = UID) -> Record:
    reply = encode({"exit_code": seq, "stdout": output})
    return Record(
        uid=uid, project="team", seq=seq, op_id=ids.derived(f"{uid}{seq}"), verb="exec",
        principal="p", at=1.5 * seq, lane="main", step=seq, request=msgspec.Raw(b'{"shell":"x"}'),
        ended_at=1.5 * seq + 1 if ended else None,
        reply=msgspec.Raw(reply if ended else b"null"),
    )  # fmt: skip


async def told(log: Trajectories, *batches: Sequence[Record], node: str = "n1") -> None:
    messages: Any = [
        SimpleNamespace(subject=trj(node), data=encode(Records(node="liar", records=list(batch))))
        for batch in batches
    ]
    await log.told(messages)


async def page(log: Trajectories, **more: Any) -> Page:
    query = {"uid": UID, "node": "n1", "project": "team", **more}
    return await log.page(TrajectoryQuery(**query), NOBODY)


async def test_records_come_back_as_they_were_told_in_order(log: Trajectories) -> None:
    all_of = [record(seq) for seq in range(1, 8)]
    await told(log, all_of[3:], all_of[:3])
    found = await page(log, limit=5)
    assert ([encode(r) for r in found.records], found.more) == (
        [encode(r) for r in all_of[:5]], True,
    )  # fmt: skip
    rest = await page(log, after=5, limit=5)
    assert ([r.seq for r in rest.records], rest.more) == ([6, 7], False)


async def test_a_result_completes_its_intent_in_any_order(log: Trajectories) -> None:
    await told(log, [record(1, ended=False)], [record(1), record(2)])
    await told(log, [record(2, ended=False), record(3, ended=False)])
    await told(log, [record(3)], [record(3, ended=False)])
    found = await page(log)
    assert [r.ended_at for r in found.records] == [2.5, 4.0, 5.5]
    assert [msgspec.json.decode(r.reply)["exit_code"] for r in found.records] == [1, 2, 3]


async def test_a_record_that_cannot_be_kept_takes_no_other_with_it(log: Trajectories) -> None:
    good = replace(record(1), request=msgspec.Raw(b'{"shell":"a\\u0000"}'))
    bad = [replace(record(2), lane="a\0b"), replace(record(3), step=2**63)]
    await told(log, [good, *bad, record(4)])
    found = (await page(log)).records
    assert [(r.seq, bytes(r.request)) for r in found] == [
        (r.seq, bytes(r.request)) for r in (good, record(4))
    ]


async def test_two_instances_that_are_told_the_same_at_once_keep_it_once(
    log: Trajectories, db: Database
) -> None:
    """Messages come again while another instance is at them, intents beside their results."""
    other = Trajectories(db, keep_s=10 * HOUR_S, max_bytes=1 << 40)
    for first in range(1, 400, 20):
        numbers = range(first, first + 20)
        await asyncio.gather(
            told(log, [record(seq, ended=seq % 3 > 0) for seq in numbers]),
            told(other, [record(seq) for seq in numbers]),
            told(log, [record(seq, ended=False) for seq in numbers]),
        )
    found = (await page(log, limit=500)).records
    assert [r.seq for r in found] == list(range(1, 400 + 1))
    assert all(r.ended_at == 1.5 * r.seq + 1 for r in found)


async def test_nobody_speaks_for_another_node_or_reads_another_project(log: Trajectories) -> None:
    await told(log, [record(1)])
    await told(log, [record(1, output="forged"), record(2, output="forged")], node="n2")
    assert [msgspec.json.decode(r.reply)["stdout"] for r in (await page(log)).records] == [""]
    assert (await page(log, project="other")).records == []
    with pytest.raises(InvalidRequest):
        await page(log, project=None)


async def test_a_page_has_a_bounded_size(log: Trajectories) -> None:
    await told(log, [record(seq, output="x" * 400_000) for seq in range(1, 6)])
    seen: list[int] = []
    more = True
    while more:
        found = await page(log, after=seen[-1] if seen else 0)
        assert 1 <= len(found.records) <= 3
        seen += [r.seq for r in found.records]
        more = found.more
    assert seen == [1, 2, 3, 4, 5]


def piece(number: int, data: bytes, *, seq: int = 1) -> OutputPiece:
    return OutputPiece(uid=UID, project="team", seq=seq, stream="stdout", piece=number, data=data)


def from_node(node: str) -> Incoming:
    return Incoming(output_of(node), {}, None)


async def test_pieces_of_an_output_are_kept_once_for_their_node_and_project(
    db: Database, admin_dsn: str
) -> None:
    outputs = Outputs(db)
    for number, data in ((0, b"a" * 1_000), (1, b"b"), (0, b"a" * 1_000), (0, b"other")):
        await outputs.take(piece(number, data), from_node("n1"))
    await outputs.take(piece(0, b"its own"), from_node("n2"))
    query = OutputQuery(uid=UID, node="n1", seq=1, stream="stdout", piece=0, project="team")
    assert (await outputs.page(query, NOBODY)).data == b"a" * 1_000
    assert (await outputs.page(replace(query, piece=1), NOBODY)).data == b"b"
    assert (await outputs.page(replace(query, node="n2"), NOBODY)).data == b"its own"
    for other in ({"piece": 2}, {"project": "foreign"}, {"seq": 2}, {"stream": "stderr"}):
        with pytest.raises(NotFound):
            await outputs.page(replace(query, **other), NOBODY)
    with pytest.raises(InvalidRequest):
        await outputs.page(replace(query, project=None), NOBODY)
    admin = await asyncpg.connect(admin_dsn)
    counted = await admin.fetchval("select sum(bytes) from audit.trajectory_hour")
    await admin.close()
    assert counted == 1_000 + 1 + len(b"its own") + 3 * ROW_BYTES


async def test_long_outputs_count_and_go_with_their_hour(
    db: Database, log: Trajectories, admin_dsn: str
) -> None:
    outputs = Outputs(db)
    for number in range(3):
        await outputs.take(piece(number, b"x" * 10_000), from_node("n1"))
    await _aged(admin_dsn, hours=20)
    await outputs.take(piece(0, b"new", seq=2), from_node("n1"))
    assert await log.forget() == 3
    query = OutputQuery(uid=UID, node="n1", seq=1, stream="stdout", piece=0, project="team")
    with pytest.raises(NotFound):
        await outputs.page(query, NOBODY)
    assert (await outputs.page(replace(query, seq=2), NOBODY)).data == b"new"
    assert await Trajectories(db, keep_s=10 * HOUR_S, max_bytes=50).forget() == 1


async def test_the_oldest_hours_go_by_age_and_by_size(
    db: Database, log: Trajectories, admin_dsn: str
) -> None:
    await told(log, [record(seq) for seq in (1, 2)])
    await _aged(admin_dsn, hours=20)
    await told(log, [record(3, output="x" * 10_000)])
    await _aged(admin_dsn, hours=1, of=3)
    await told(log, [record(4)])
    assert await log.forget() == 2
    assert [r.seq for r in (await page(log)).records] == [3, 4]
    assert await log.forget() == 0
    small = Trajectories(db, keep_s=10 * HOUR_S, max_bytes=5_000)
    assert await small.forget() == 1
    assert [r.seq for r in (await page(log)).records] == [4]


async def _aged(admin_dsn: str, *, hours: int, of: int = 0) -> None:
    """Has what arrived last (from number ``of`` on) be that old."""
    now = int(time.time() // HOUR_S)
    admin = await asyncpg.connect(admin_dsn)
    for table in ("trajectory", "trajectory_output"):
        await admin.execute(
            f"update audit.{table} set hour = $1 where seq >= $2 and hour >= $3",
            now - hours, of, now - 1,
        )  # fmt: skip
    await admin.execute(
        "update audit.trajectory_hour set hour = $1 where hour >= $2", now - hours, now - 1
    )
    await admin.close()
