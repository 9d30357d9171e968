"""audit as it runs: from the bus to the record and back."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import asyncpg
import pytest

from schemas.audit import Access, AccessRecords, AuditPage, AuditQuery
from schemas.base import decode, encode
from schemas.bus import DeadLetter
from schemas.subjects import dlq, evt, evt_edge, rpc
from shared import ids
from shared.bus import Bus, Outgoing
from shared.errors import InvalidRequest
from tests.integration.services.conftest import SETTLE_S

pytestmark = pytest.mark.integration


def records(project: str, count: int, **fields: Any) -> list[Access]:
    values: dict[str, Any] = {
        "principal": "p", "verb": "sandbox.create", "outcome": "ok", "at": time.time(), **fields,
    }  # fmt: skip
    return [Access(id=ids.new(), project=project, **values) for _ in range(count)]


async def entries(bus: Bus, project: str, count: int, **fields: Any) -> AuditPage:
    """The project's page once it holds ``count`` entries."""
    query = AuditQuery(projects=[project], limit=1000, **fields)
    end = time.monotonic() + SETTLE_S
    while True:
        page = await bus.request(rpc("audit", "list"), query, AuditPage)
        if len(page.entries) >= count or time.monotonic() > end:
            assert len(page.entries) == count
            return page
        await asyncio.sleep(0.05)


async def test_every_record_is_kept_once_however_often_it_comes(bus: Bus, audit: None) -> None:
    """(O08) The same records in one message, in two, and from a redelivery."""
    told = records("once", 30)
    body = encode(AccessRecords(source="auth", records=told))
    again = encode(AccessRecords(source="auth", records=told[:10] * 2))
    subject = evt("auth", "access", "a1")
    await bus.store([Outgoing(subject, body), Outgoing(subject, again), Outgoing(subject, body)])
    page = await entries(bus, "once", 30)
    assert {e.record["id"] for e in page.entries} == {r.id for r in told}


async def test_refusals_are_recorded_like_successes(bus: Bus, audit: None) -> None:
    told = records("refused", 1, outcome="forbidden", target="x") + records("refused", 1)
    await bus.store(
        [Outgoing(evt("auth", "access", "a1"), encode(AccessRecords(source="auth", records=told)))]
    )
    page = await entries(bus, "refused", 2)
    assert {e.record["outcome"] for e in page.entries} == {"ok", "forbidden"}


async def test_an_edge_cannot_speak_for_another(bus: Bus, audit: None) -> None:
    """The record's reporter is the subject's, and equal ids of two reporters are two."""
    (told,) = records("edges", 1, node="innocent")
    body = encode(AccessRecords(source="auth", records=[told]))
    await bus.store([Outgoing(evt_edge("access", n), body) for n in ("n1", "n2")])
    page = await entries(bus, "edges", 2)
    assert {(e.record["node"], e.record["source"]) for e in page.entries} == {
        ("n1", "edge.n1"), ("n2", "edge.n2"),
    }  # fmt: skip


async def test_an_unreadable_message_is_a_dead_letter_and_harms_no_neighbour(
    bus: Bus, audit: None
) -> None:
    letters: dict[int, DeadLetter] = {}

    async def take(msg: Any) -> None:
        letter = decode(msg.data, DeadLetter)
        letters[letter.stream_seq] = letter

    await bus.client.subscribe(dlq("DSEC_EVT"), cb=take)
    await bus.client.flush()
    good = [encode(AccessRecords(source="auth", records=records("poison", 1))) for _ in range(20)]
    subject = evt("auth", "access", "a1")
    bodies = [*good[:7], b"not json", *good[7:], b'{"v":99,"source":"x","records":[]}']
    await bus.store([Outgoing(subject, body) for body in bodies])
    await entries(bus, "poison", 20)
    async with asyncio.timeout(SETTLE_S):
        while len(letters) < 2:
            await asyncio.sleep(0.05)
    assert {letter.subject for letter in letters.values()} == {subject}
    assert sorted("version 99" in letter.cause for letter in letters.values()) == [False, True]


async def test_a_query_that_names_no_project_is_refused(bus: Bus, audit: None) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await bus.request(rpc("audit", "list"), AuditQuery(), AuditPage)
    assert caught.value.field == "projects"


async def test_reading_the_record_changes_nothing(bus: Bus, audit: None, admin_dsn: str) -> None:
    """(O04)"""
    await bus.store(
        [Outgoing(evt("auth", "access", "a1"),
                  encode(AccessRecords(source="auth", records=records("reads", 3))))]
    )  # fmt: skip
    first = await entries(bus, "reads", 3)
    admin = await asyncpg.connect(admin_dsn)
    before = await admin.fetchval("select seq from audit.head")
    for _ in range(100):
        assert await entries(bus, "reads", 3) == first
    assert await admin.fetchval("select seq from audit.head") == before
    await admin.close()
