"""The record on a real database: order, idempotency, privileges, verification."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import asyncpg
import pytest

from schemas.audit import Access, AccessRecords, AuditQuery, Violation
from schemas.base import encode
from services.audit import store as storing
from services.audit.records import Row, from_accesses, from_violation
from services.audit.store import Store
from services.audit.verify import Verdict, verify_all
from shared import ids
from shared.db import Database

pytestmark = pytest.mark.integration


def access(
    number: int, *, project: str = "root", id: str | None = None, source: str = "auth",
    **fields: object,
) -> Row:  # fmt: skip
    record = Access(
        id=id or f"r{number}", at=1_800_000_000.25 + number, project=project, principal="p1",
        verb="sandbox.create", outcome="ok", **fields,  # type: ignore[arg-type]
    )  # fmt: skip
    told = encode(AccessRecords(source="liar", records=[record]))
    (row,) = from_accesses(f"dsec.evt.v1.{source}.access.k", told)
    return row


@pytest.fixture
async def dsn(dsn_of: Callable[[str], str], admin_dsn: str) -> str:
    made = dsn_of("audit")
    admin = await asyncpg.connect(admin_dsn)
    await admin.execute("truncate audit.record")
    await admin.execute("truncate audit.anchor")
    await admin.execute("update audit.head set seq = 0, hash = $1", bytes(32))
    await admin.execute("update audit.head set day = (now() at time zone 'utc')::date")
    await admin.close()
    return made


@pytest.fixture
async def store(dsn: str) -> AsyncIterator[Store]:
    db = Database(dsn, "audit")
    yield Store(db, rows_per_transaction=7)
    await db.close()


async def judge(store: Store) -> Verdict:
    verdict, _ = await verify_all(store)
    return verdict


async def test_a_repeated_record_is_written_once(store: Store) -> None:
    rows = [access(i) for i in range(20)]
    assert await store.append([*rows, rows[3]]) == 20
    assert await store.append(rows) == 0
    assert await store.append([*rows, access(99)]) == 1
    assert (await store.head()).seq == 21
    assert (await judge(store)).broken_at is None


async def test_what_comes_again_among_new_ones_is_written_once(
    store: Store, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever order ids have among those that are recorded: just behind them, between them,
    around more of them than are looked at, of several reporters at once."""
    monkeypatch.setattr(storing, "MORE_BETWEEN", 3)
    wide = Store(Database(dsn, "audit"))
    first = [access(i, id=f"{i:03}") for i in range(0, 100, 2)]
    assert await wide.append(first) == 50
    # the same ids of other reporters are other records
    others = [access(i, id=f"{i:03}", source=s) for i in range(100) for s in ("edge", "imagesvc")]
    assert await wide.append(others) == 200
    behind = [access(i, id=f"{i:03}") for i in range(99, 110)]
    assert await wide.append([*first[40:], *behind]) == 11
    assert await wide.append([first[0], first[-1], access(1, id="001")]) == 1  # around 49 others
    between = [access(i, id=f"{i:03}") for i in range(41, 60, 2)]
    assert await wide.append([first[20], *between, first[30], others[7]]) == 10
    assert await wide.append([*first, *others, *between]) == 0
    await wide._db.close()
    seen = [entry.row.record_id async for entry in store.entries()]
    assert len(seen) == len(set(seen)) == 50 + 200 + 11 + 1 + 10
    assert (await judge(store)).broken_at is None


async def test_ids_are_compared_byte_by_byte(store: Store) -> None:
    """A range of ids is one to Python and to the server, whatever the database's locale."""
    ids_of = ["Z", "a-b", "ab", "\u00e4", "z", "A", "a b", "\U0001f600"]
    rows = [access(n, id=one) for n, one in enumerate(ids_of)]
    assert await store.append(rows) == len(rows)
    for row in rows:
        assert await store.append([row, access(50, id="0"), access(51, id="\U0010ffff")]) in (0, 2)


async def test_entries_that_jsonb_respelled_keep_their_hash(store: Store, admin_dsn: str) -> None:
    await store.append([access(i, target="t", bytes=i) for i in range(10)])
    admin = await asyncpg.connect(admin_dsn)
    change = "alter table audit.record alter record type {0} using record::text::{0}"
    await admin.execute(change.format("jsonb"))
    await admin.execute(change.format("json"))
    await admin.close()
    assert (await judge(store)).broken_at is None
    assert (await store.page(AuditQuery(target="t", limit=1))).entries[0].record["bytes"] == 9


async def test_two_writers_make_one_chain(dsn: str) -> None:
    """Both append the same and different records at once; the chain has no gap."""
    databases = [Database(dsn, "audit") for _ in range(2)]
    stores = [Store(db, rows_per_transaction=5) for db in databases]
    mine = [[access(1000 * w + i) for i in range(100)] for w in range(2)]
    both = [access(9000 + i) for i in range(50)]
    added = await asyncio.gather(
        *(s.append(rows + both) for s, rows in zip(stores, mine, strict=True))
    )
    assert sum(added) == 250
    verdict = await judge(stores[0])
    assert (verdict.broken_at, verdict.count) == (None, 250)
    for db in databases:
        await db.close()


async def test_pages_are_newest_first_and_bounded_by_projects(store: Store) -> None:
    await store.append([access(i, project="a" if i % 2 else "b") for i in range(10)])
    await store.append([access(50, project="a", request_id="q1", target="t1")])
    first = await store.page(AuditQuery(projects=["a"], limit=4))
    assert [e.record["id"] for e in first.entries] == ["r50", "r9", "r7", "r5"]
    second = await store.page(AuditQuery(projects=["a"], limit=4, before=first.next))
    assert [e.record["id"] for e in second.entries] == ["r3", "r1"]
    assert second.next is None
    one = await store.page(AuditQuery(projects=["a", "b"], request_id="q1"))
    assert [e.record["target"] for e in one.entries] == ["t1"]
    assert not (await store.page(AuditQuery(projects=["a"], project="b"))).entries


async def test_the_services_role_can_only_add(store: Store, dsn: str) -> None:
    await store.append([access(1)])
    connection = await asyncpg.connect(dsn, server_settings={"search_path": "audit"})
    partition = await connection.fetchval("select min(inhrelid::regclass::text) from pg_inherits")
    try:
        for statement in (
            "update record set verb = 'x'", "delete from record", "truncate record",
            "drop table record", "alter table record disable trigger all",
            "delete from head", "delete from anchor",
            "update retention set keep_days = 7", "select * from {partition}",
            "delete from {partition}", "drop table {partition}",
            "alter table record detach partition {partition}",
            "create table mine partition of record default",
            "create table audit.head2 as table audit.head; drop table head",
        ):  # fmt: skip
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await connection.execute(statement.format(partition=partition))
    finally:
        await connection.close()


@pytest.mark.parametrize(
    ("tamper", "broken_at", "reason"),
    [
        ("update audit.record set record = jsonb_set(record::jsonb, '{outcome}', '\"no\"')::text"
         "::json where seq = 5", 5, "content"),
        ("update audit.record set principal = 'other' where seq = 4", 4, "columns"),
        ("delete from audit.record where seq = 7", 7, "missing"),
        ("delete from audit.record where seq > 8", 9, "ends here"),
        ("update audit.record set prev = hash where seq = 3", 3, "follow"),
        ("update audit.head set hash = '\\x00'", 12, "head"),
    ],
)  # fmt: skip
async def test_verify_finds_where_the_record_was_changed(
    store: Store, admin_dsn: str, tamper: str, broken_at: int, reason: str
) -> None:
    await store.append([access(i) for i in range(12)])
    assert (await judge(store)).count == 12
    admin = await asyncpg.connect(admin_dsn)
    await admin.execute(tamper)
    await admin.close()
    verdict = await judge(store)
    assert verdict.broken_at == broken_at
    assert reason in verdict.reason


async def test_numbers_and_text_keep_their_hash(store: Store) -> None:
    actor = {
        "z": 1e22, "a": 1.5e-7, "whole": 3.0, "minus": -0.0, "big": 2**53, "nul": "a\0b",
        "deep": [{"k": 0.1, "b": [True, None]}], "ü": "ß\u2028",
    }  # fmt: skip
    violation = Violation(
        id=ids.new(), at=1.0, node="x", uid="u", project="root", source="net",
        verdict="denied", rule="dns", mechanism="bpf", actor=actor,
    )  # fmt: skip
    (row,) = [from_violation("n1", violation, {}, root="root", now=2.0)]
    assert await store.append([row]) == 1
    assert (await judge(store)).broken_at is None
    (entry,) = (await store.page(AuditQuery(projects=["root"]))).entries
    assert entry.record["node"] == "n1"
    assert entry.record["actor"]["nul"] == "a\ufffdb"


async def days_back(admin_dsn: str, days: int) -> None:
    """As if everything recorded so far had been recorded so many days ago."""
    admin = await asyncpg.connect(admin_dsn, server_settings={"search_path": "audit"})
    async with admin.transaction():
        await admin.execute(
            "create temp table moved as select * from record; truncate record;"
            "update head set day = day"
        )
        day = await admin.fetchval("select (now() at time zone 'utc')::date - $1::int", days)
        name = f"record_{day:%Y%m%d}"
        await admin.execute(
            f"create table {name} partition of record for values from ('{day}') to "
            f"('{day}'::date + 1); revoke all on {name} from dsec_audit"
        )
        await admin.execute("update moved set day = $1", day)
        await admin.execute("insert into record select * from moved; drop table moved")
    await admin.close()


async def test_old_days_go_and_the_chain_holds_behind_their_anchor(
    store: Store, admin_dsn: str
) -> None:
    """Three days: one past retention, one within, today's."""
    await store.append([access(i) for i in range(10)])
    await days_back(admin_dsn, 100)
    await store.append([access(i) for i in range(10, 15)])
    assert (await judge(store)).count == 15  # over both partitions
    assert await store.keep_days(root="root") == 1
    assert await store.keep_days(root="root") == 0
    verdict = await judge(store)
    assert (verdict.broken_at, verdict.count, verdict.seq) == (None, 6, 16)
    assert (await store.anchor()).seq == 10
    (told,) = (await store.page(AuditQuery(project="root", kind="retention"))).entries
    assert (told.record["entries"], told.record["seq"]) == (10, 10)
    page = await store.page(AuditQuery(project="root", kind="access", limit=50))
    assert [e.record["id"] for e in page.entries] == [f"r{i}" for i in range(14, 9, -1)]


@pytest.mark.parametrize(
    ("tamper", "reason"),
    [
        ("delete from audit.record where seq = 11", "missing"),
        ("insert into audit.anchor values (12, (select hash from audit.record where seq = 12),"
         " now(), 2); delete from audit.record where seq <= 12", "no entry tells"),
        ("update audit.anchor set hash = '\\x00'", "follow"),
        ("delete from audit.anchor", "missing"),
    ],
)  # fmt: skip
async def test_days_that_went_otherwise_are_found(
    store: Store, admin_dsn: str, tamper: str, reason: str
) -> None:
    await store.append([access(i) for i in range(10)])
    await days_back(admin_dsn, 101)
    await store.append([access(i) for i in range(10, 15)])
    await store.keep_days(root="root")
    admin = await asyncpg.connect(admin_dsn)
    await admin.execute(tamper)
    await admin.close()
    assert reason in (await judge(store)).reason


async def test_days_are_made_near_today_only(dsn: str) -> None:
    connection = await asyncpg.connect(dsn, server_settings={"search_path": "audit"})
    for call in ("make_days('2020-01-01', 2)", "make_days(current_date, 400)"):
        with pytest.raises(asyncpg.RaiseError):
            await connection.execute(f"select {call}")
    await connection.execute("select make_days(current_date, 4)")
    await connection.close()
