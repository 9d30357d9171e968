"""What the edge remembers, whatever happens to it."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from schemas.sandbox import EdgeOpItem, Observation, ResolvedSpec, SandboxSpec, StartItem
from services.edge.drivers.base import Handle
from services.edge.journal import pruning, records, timerecords
from services.edge.journal.claims import Claim
from services.edge.journal.journal import Journal
from services.edge.journal.records import Accepted, SandboxRow
from services.edge.sandbox.rules import Times
from services.edge.sandbox.verifying import Kept, Lease, Scoring
from shared import ids
from shared.errors import Internal, Unavailable

REPOSITORY = Path(__file__).parents[5]
UID = "0" * 26


def uid(n: int) -> str:
    return f"{n:026d}"


def row(n: int = 0, generation: int = 1) -> SandboxRow:
    item = StartItem(uid=uid(n), project="p", generation=generation, spec=0, expires_at=9.0)
    spec = SandboxSpec(backend="fake", env={"A": "é"}, ttl_running_stop=5.0, scoring_grace_s=9.0)
    accepted = Accepted(item=item, resolved=ResolvedSpec(spec=spec))
    return SandboxRow(accepted, generation, Times(5.0, None))


def observation(n: int = 0, observed: str = "stopped", at: float | None = None) -> Observation:
    when = time.time() if at is None else at
    return Observation(uid=uid(n), generation=1, observed=observed, at=when)  # type: ignore[arg-type]


async def test_a_sandbox_comes_back_as_it_was(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j.db")
    journal.start()
    handle = Handle(UID, "fake", {"pid": 7, "x": [1, {"y": None}]}, {"network": "bpf"})
    op = EdgeOpItem(uid=UID, project="p", generation=3, cause="cancelled", grace_s=2.0)
    kept = Kept(Scoring("deadline", 5.0), Lease("p/v", 6.0, 7.5, alone=True), asked_at=4.0)
    await journal.write(records.accept(row()), records.started(UID, handle, 12.5))
    await journal.write(
        records.state(UID, 2, paused=True, times=Times(None, 60.0)), records.op("stop", op),
        timerecords.keep(UID, kept),
    )  # fmt: skip
    await journal.close()
    again = Journal(tmp_path / "j.db")
    (found,) = records.load_sandboxes(again.db)
    assert found.accepted == row().accepted
    assert (found.handle, found.started_at, found.paused) == (handle, 12.5, True)
    assert (found.generation, found.times, found.kept) == (2, Times(None, 60.0, 9.0), kept)
    assert records.load_ops(again.db) == [("stop", op)]
    again.start()
    await again.write(*records.remove(UID))
    assert await again.run(lambda db: records.load_sandboxes(db)) == []
    assert await again.run(timerecords.load) == {}
    await again.close()


async def test_changes_written_together_are_all_there_or_none(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j.db")
    journal.start()
    bad = ("insert into nowhere values (1)", ())
    with pytest.raises(Unavailable):
        await journal.write(records.accept(row()), bad)
    assert await journal.run(lambda db: records.load_sandboxes(db)) == []
    await journal.close()


async def test_one_bad_job_does_not_take_its_batch_with_it(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j.db")
    journal.start()
    jobs = [journal.write(records.accept(row(n))) for n in range(50)]
    jobs.insert(25, journal.write(("select * from nowhere", ())))
    results = await asyncio.gather(*jobs, return_exceptions=True)
    assert [r for r in results if r is not None] == [results[25]]
    assert isinstance(results[25], Unavailable)
    assert len(await journal.run(lambda db: records.load_sandboxes(db))) == 50
    await journal.close()


async def test_jobs_are_done_in_the_order_they_came(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j.db")
    journal.start()
    for n in range(300):
        journal.post(records.outbox(1, "sandbox", str(n).encode()))
    found = await journal.run(lambda db: records.load_outbox(db, "sandbox"))
    assert found == [(1, b"299")]
    await journal.close()
    with pytest.raises(Unavailable):
        journal.post(records.outbox(1, "sandbox", b""))


async def test_the_first_intent_of_an_operation_stays(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j.db")
    journal.start()
    first, other = Claim(UID, "op", b"h1", 1.0), Claim(UID, "op", b"h2", 4.0)
    assert await journal.run(lambda db: records.begin_exec(db, first)) is None
    known = await journal.run(lambda db: records.begin_exec(db, Claim(UID, "op", b"h2", 2.0)))
    assert known == records.ExecRow(b"h1", None)
    await journal.write(records.exec_ended(UID, "op", b"reply", 2.0))
    known = await journal.run(lambda db: records.begin_exec(db, Claim(UID, "op", b"h1", 3.0)))
    assert known == records.ExecRow(b"h1", b"reply")
    await journal.write(records.exec_dropped(UID, "op", b"refused", 3.0))
    assert await journal.run(lambda db: records.begin_exec(db, other)) is None
    await journal.close()


async def test_surplus_goes_some_at_a_time_the_oldest_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quarter of a million at once would keep commands waiting for seconds."""
    monkeypatch.setattr(pruning, "MAX_EXECS", 10)
    monkeypatch.setattr(pruning, "SHED_EXECS", 7)
    journal = Journal(tmp_path / "j.db")
    journal.start()
    await journal.write(*(records.exec_begun(Claim(UID, str(n), b"", float(n))) for n in range(30)))
    left = []
    ordered = "select at from exec order by at"
    for _ in range(4):
        await journal.write(pruning.shed())
        rows = await journal.run(lambda db: db.execute(ordered).fetchall())
        left.append((len(rows), rows[0][0]))
    assert left == [(22, 8.0), (14, 16.0), (10, 20.0), (10, 20.0)]
    await journal.close()


async def test_a_small_file_has_no_rows_added_up_and_a_large_one_loses_the_oldest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path / "j.db")
    journal.start()
    reply = b"x" * 50_000
    for n in range(20):
        claim = Claim(UID, str(n), b"", float(n))
        await journal.write(records.exec_whole(claim, reply, 30.0))

    async def pruned(most: int) -> int:
        monkeypatch.setattr(pruning, "MAX_EXEC_BYTES", most)
        await journal.write(*pruning.prune(31.0))
        kept = await journal.run(lambda db: list(records.exec_keys(db)))
        return min(int(op_id) for _, op_id in kept)

    assert await pruned(2_000_000) == 0
    assert await pruned(500_000) == 10
    await journal.close()


async def test_old_and_surplus_rows_are_pruned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pruning, "MAX_EXECS", 10)
    now = 1e9
    journal = Journal(tmp_path / "j.db")
    journal.start()
    await journal.write(
        records.bury(observation(1, at=now - pruning.TOMBSTONE_S - 1)),
        records.bury(observation(2, at=now - 1)),
        *(records.exec_begun(Claim(UID, str(n), b"", now - n)) for n in range(30)),
        *pruning.prune(now),
    )
    tombs = await journal.run(lambda db: records.find_tombstones(db, [uid(1), uid(2)]))
    assert list(tombs) == [uid(2)]
    kept = await journal.run(lambda db: db.execute("select op_id from exec").fetchall())
    assert {int(op) for (op,) in kept} == set(range(10))
    await journal.close()


KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
from services.edge.journal.claims import Claim
from services.edge.journal.journal import Journal
from tests.unit.services.edge.journal.test_journal import row
from services.edge.journal import pruning, records, timerecords

async def main():
    journal = Journal(Path(sys.argv[1]))
    journal.start()
    await journal.write(records.accept(row(1)))
    def half(db):
        db.execute(*records.accept(row(2)))
        os.kill(os.getpid(), signal.SIGKILL)   # written, not committed
    await journal.run(half)

asyncio.run(main())
"""


def test_a_death_between_write_and_commit_loses_only_that(tmp_path: Path) -> None:
    path = tmp_path / "j.db"
    ended = subprocess.run(
        [sys.executable, "-c", KILLED, str(path)], cwd=REPOSITORY, timeout=60,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip
    assert ended.returncode == -signal.SIGKILL
    journal = Journal(path)
    assert [r.uid for r in records.load_sandboxes(journal.db)] == [uid(1)]
    assert not list(tmp_path.glob("*.damaged-*"))
    journal.db.close()


@pytest.mark.parametrize("how", ["garbage", "zeros in the middle", "unreadable content"])
def test_a_damaged_file_is_moved_aside(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "j.db"
    journal = Journal(path)
    for n in range(500):
        journal.db.execute(*records.accept(row(n)))
    if how == "unreadable content":
        journal.db.execute("update sandbox set accepted = x'00' where uid = ?", (uid(3),))
    journal.db.execute("pragma wal_checkpoint(truncate)")
    journal.db.close()
    data = bytearray(path.read_bytes())
    if how == "garbage":
        data = bytearray(b"no database at all " * 4000)
    elif how == "zeros in the middle":
        data[8192 : len(data) - 4096] = bytes(len(data) - 12288)
    path.write_bytes(data)
    again = Journal(path)
    assert records.load_sandboxes(again.db) == []
    assert "is damaged" in caplog.text
    found = tmp_path.glob("j.db.damaged-*")
    (aside,) = (p for p in found if not p.name.endswith(("-wal", "-shm")))
    assert aside.read_bytes() == bytes(data)
    again.db.close()


def test_a_journal_of_a_newer_version_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "j.db"
    journal = Journal(path)
    journal.db.execute("update meta set value = '99' where key = 'version'")
    journal.db.close()
    with pytest.raises(Internal, match="newer version"):
        Journal(path)
    db = sqlite3.connect(path)
    assert db.execute("select value from meta").fetchone() == ("99",)
    db.close()


OLD = """
create table meta (key text primary key, value text not null) without rowid;
create table sandbox (
    uid text primary key, generation integer not null, accepted blob not null,
    handle text, epoch integer not null default 0, started_at real,
    idle_s real, deadline_s real, paused integer not null default 0
) without rowid;
create table exec (
    uid text not null, op_id text not null, hash blob not null, at real not null, reply blob,
    primary key (uid, op_id)
) without rowid;
insert into meta values ('version', '1');
"""


async def test_a_journal_of_the_first_version_is_read_on(tmp_path: Path) -> None:
    before = sqlite3.connect(tmp_path / "j.db")
    before.executescript(OLD)
    before.execute("insert into exec values (?, 'old', 'h', 1.0, 'reply')", (UID,))
    before.commit()
    before.close()
    for _ in range(2):
        journal = Journal(tmp_path / "j.db")
        journal.start()
        found = await journal.run(lambda db: records.find_exec(db, UID, "old"))
        assert found is not None and found.seq == 0
        claim = Claim(UID, ids.new(), b"h", 2.0, 5, b"{}")
        assert await journal.run(lambda db, c=claim: records.begin_exec(db, c)) is None  # type: ignore[misc]
        untold = await journal.run(lambda db: list(records.untold(db)))
        assert {row[1] for row in untold} == {5}
        await journal.close()
