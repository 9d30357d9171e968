"""Intents of commands: they survive the process from the moment they are kept, once
committed they need no slot, and nothing is known that is not so."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from services.edge.journal import claims, execs, records
from services.edge.journal.claims import Claim, Claims
from services.edge.journal.execs import Execs
from services.edge.journal.journal import Journal
from services.edge.journal.pruning import MAX_EXECS
from services.edge.journal.records import ExecRow
from shared import ids

REPOSITORY = Path(__file__).resolve().parents[5]
UID, OP, HASH = ids.derived("sandbox"), ids.derived("operation"), b"h" * 32


class Edge:
    """The part of an edge that remembers commands; ``dies`` as by SIGKILL."""

    def __init__(self, folder: Path) -> None:
        self.journal = Journal(folder / "j.db")
        self.execs = Execs(self.journal)
        self.journal.start()

    @property
    def slots(self) -> list[Claim]:
        assert self.execs._claims is not None
        return self.execs._claims.found()

    async def begin(
        self, op_id: str = OP, hash_: bytes = HASH, at: float = 1.0, **more: Any
    ) -> ExecRow | None:
        return await self.execs.begin(UID, op_id, lambda: Claim(UID, op_id, hash_, at, **more))

    async def close(self) -> None:
        await self.journal.close()
        self.execs.close()


def end(edge: Edge, op_id: str) -> None:
    """As the door does it."""
    changes, done = edge.execs.ended(UID, op_id, b"reply", 5.0)
    edge.journal.post(*changes, done=done)


@pytest.fixture
async def edge(tmp_path: Path) -> AsyncIterator[Edge]:
    edge = Edge(tmp_path)
    yield edge
    await edge.close()


async def test_an_intent_is_there_before_it_is_committed_and_has_no_slot_after(edge: Edge) -> None:
    assert await edge.begin() is None
    assert edge.slots == [Claim(UID, OP, HASH, 1.0)]
    assert await edge.begin(OP, b"g" * 32, 2.0) == ExecRow(HASH, None)
    await edge.journal.check()
    assert edge.slots == []
    assert await edge.begin(OP, HASH, 3.0) == ExecRow(HASH, None)
    end(edge, OP)
    assert await edge.execs.find(UID, OP) == ExecRow(HASH, b"reply")


async def test_what_ends_before_the_journal_was_told_is_written_once(edge: Edge) -> None:
    """And has its slot until that is committed."""
    assert await edge.begin(seq=3, body=b"record") is None
    end(edge, OP)
    assert edge.slots == [Claim(UID, OP, HASH, 1.0, 3, b"record")]
    assert await edge.begin(at=2.0) == ExecRow(HASH, b"reply", 3, b"record")
    assert edge.slots == []


async def test_the_journal_is_told_in_time(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execs, "TELL_S", 0.01)
    assert await edge.begin() is None
    async with asyncio.timeout(60):
        while edge.slots:
            await asyncio.sleep(0.01)
    assert await edge.execs.find(UID, OP) == ExecRow(HASH, None)


async def test_an_operation_whose_end_could_not_be_written_does_not_begin_again(
    edge: Edge,
) -> None:
    assert await edge.begin() is None
    edge.execs.ended(UID, OP, b"reply", 5.0)  # and is not posted
    assert await edge.begin(at=2.0) == ExecRow(HASH, None)
    assert edge.slots == [Claim(UID, OP, HASH, 1.0)]


async def test_what_did_not_run_may_begin_again(edge: Edge) -> None:
    for at in (1.0, 2.0):
        assert await edge.begin(OP, HASH, at) is None
        edge.journal.post(*edge.execs.dropped(UID, OP, b"refused", 5.0)[0])
        assert edge.slots == []
    assert await edge.execs.find(UID, OP) is None
    assert await edge.begin(OP, HASH, 3.0) is None


async def test_who_asks_again_after_many_others_gets_the_first_result(
    edge: Edge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client was cut off while others had a node's every turn."""
    monkeypatch.setattr(execs, "KNOWN_EXECS", 4)
    assert await edge.begin() is None
    end(edge, OP)
    for number in range(20):
        other = ids.derived(str(number))
        assert await edge.begin(other) is None
        end(edge, other)
    found = await edge.execs.begin(UID, OP, lambda: Claim(UID, OP, HASH, 2.0), again=True)
    assert found is not None
    assert found.reply == b"reply"


@pytest.mark.parametrize("restarted", [False, True])
async def test_an_id_is_known_as_long_as_the_journal_keeps_its_result(
    tmp_path: Path, restarted: bool
) -> None:
    """A script that chose it may come back late, as a client that never asked before."""
    edge = Edge(tmp_path)
    assert await edge.begin() is None
    end(edge, OP)
    if restarted:
        await edge.close()
        edge = Edge(tmp_path)
    for number in range(MAX_EXECS):  # others' commands meanwhile
        edge.execs._known.adds((UID, str(number)))
    assert await edge.begin(at=2.0) == ExecRow(HASH, b"reply")
    await edge.close()


def test_new_ids_are_seldom_taken_for_known_ones() -> None:
    known = execs._Known([])
    assert sum(known.adds((UID, str(n))) for n in range(MAX_EXECS)) > MAX_EXECS * 0.95
    assert not known.adds((UID, "0"))


async def test_more_intents_than_slots_wait_for_their_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "SLOTS", 2)
    edge = Edge(tmp_path)
    names = [ids.derived(str(n)) for n in range(5)]
    for number, op_id in enumerate(names):
        assert await edge.begin(op_id, HASH, float(number)) is None
        assert len(edge.slots) <= 2
    edge.execs.tell()
    await edge.journal.check()
    assert edge.slots == []
    assert [await edge.execs.find(UID, op) for op in names] == [ExecRow(HASH, None)] * 5
    await edge.close()


KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
from tests.unit.services.edge.journal.test_execs import Edge, HASH, OP, UID
from shared import ids

async def main():
    edge = Edge(Path(sys.argv[1]))
    other = ids.derived("dropped")
    assert await edge.begin(other, HASH, 1.0) is None
    edge.journal.post(*edge.execs.dropped(UID, other, b"refused", 5.0)[0])
    assert await edge.begin(OP, HASH, 2.0) is None
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


async def test_an_intent_outlives_a_kill_right_after_it(tmp_path: Path) -> None:
    """Nothing was committed yet; what was known not to have run stays so."""
    ended = subprocess.run(  # noqa: ASYNC221 - nothing else happens here
        [sys.executable, "-c", KILLED, str(tmp_path)], cwd=REPOSITORY, timeout=60,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip
    assert ended.returncode == -signal.SIGKILL
    before = sqlite3.connect(tmp_path / "j.db")
    assert before.execute("select count(*) from exec").fetchone() == (0,)
    before.close()
    edge = Edge(tmp_path)
    assert edge.slots == []
    assert await edge.begin(OP, HASH, 3.0) == ExecRow(HASH, None)
    assert await edge.execs.find(UID, ids.derived("dropped")) is None
    await edge.close()


async def test_a_failed_commit_keeps_the_slot(edge: Edge) -> None:
    trigger = "create trigger no before insert on exec begin select raise(abort, 'no'); end"
    edge.journal.post((trigger, ()))
    await edge.journal.check()
    assert await edge.begin() is None
    edge.execs.tell()
    await edge.journal.check()
    assert edge.slots == [Claim(UID, OP, HASH, 1.0)]


def test_a_torn_slot_is_no_intent(tmp_path: Path) -> None:
    path = tmp_path / "claims"
    first = Claims(path)
    slots = [first.put(Claim(UID, ids.derived(str(n)), HASH, float(n))) for n in range(3)]
    assert slots == [0, 1, 2]
    first.close()
    data = bytearray(path.read_bytes())
    data[len(data) // claims.SLOTS + 40] ^= 1
    path.write_bytes(data)
    assert [c.at for c in Claims(path).found()] == [0.0, 2.0]


def test_ids_of_another_length_have_no_slot(tmp_path: Path) -> None:
    slots = Claims(tmp_path / "claims")
    assert slots.put(Claim(UID, "short", HASH, 1.0)) is None
    assert slots.put(Claim(UID, OP, b"short", 1.0)) is None
    assert slots.found() == []


async def test_without_room_for_the_slots_every_intent_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(_descriptor: int, _size: int) -> None:
        raise OSError(28, "no space left")

    monkeypatch.setattr(claims, "_fill", full)
    edge = Edge(tmp_path)
    assert "waits for the journal" in caplog.text
    assert await edge.begin() is None
    assert records.find_exec(edge.journal.reader(), UID, OP) == ExecRow(HASH, None)
    await edge.close()
