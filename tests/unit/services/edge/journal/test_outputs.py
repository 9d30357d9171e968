"""Whole outputs on a node's disk: what is kept, within which bounds, and how it gets out."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from schemas.base import Ok
from schemas.exec import ExecReply, WholeOutput
from schemas.trajectory import OUTPUT_PIECE_BYTES, OutputPiece, output_of
from services.edge.door import outcomes
from services.edge.journal import outputs
from services.edge.journal.logged import Logged
from services.edge.journal.outputs import Outputs, Room
from shared import ids
from shared.errors import InvalidRequest, Unavailable
from shared.trajectory import Record

UID = ids.derived("sandbox")
LIMIT = 1_000
HANG_S = 60.0
ROOM = Room(output_bytes=1 << 20, spool_bytes=2 << 20)


class Services:
    """Take pieces, or do not."""

    def __init__(self) -> None:
        self.errors: list[Exception] = []
        self.pieces: list[OutputPiece] = []

    async def request(self, subject: str, piece: OutputPiece, _: Any, *, timeout_s: float) -> Ok:
        assert subject == output_of("n1")
        if self.errors:
            raise self.errors.pop(0)
        self.pieces.append(piece)
        return Ok()

    def whole(self, seq: int, stream: str = "stdout") -> bytes:
        mine = [p for p in self.pieces if (p.seq, p.stream) == (seq, stream)]
        by_number = {p.piece: p.data for p in mine}
        return b"".join(by_number[n] for n in range(len(by_number)))


@pytest.fixture
def services() -> Services:
    return Services()


def made(folder: Path, services: Services, *, room: Room = ROOM) -> Outputs:
    link: Any = SimpleNamespace(bus=services)
    return Outputs(folder, node="n1", link=link, room=room)


def logged(on: Outputs, seq: int) -> Logged:
    record = Record(
        uid=UID, project="team", seq=seq, op_id=ids.new(), verb="exec", principal="p", at=1.0
    )
    return Logged(seq, record, limit=LIMIT, spool=on.begin)


def data(size: int) -> bytes:
    return bytes(n % 251 for n in range(size))


async def gone(on: Outputs) -> None:
    async with asyncio.timeout(HANG_S):
        while list(on.folder.iterdir()):
            await asyncio.sleep(0.01)


async def test_a_long_output_is_kept_as_a_whole_and_told_in_pieces(
    tmp_path: Path, services: Services
) -> None:
    on = made(tmp_path, services)
    on.start()
    long = logged(on, 7)
    out, err = data(OUTPUT_PIECE_BYTES * 2 + 5), data(LIMIT)
    for at in range(0, len(out), 999):
        long.add("stdout", out[at : at + 999])
    long.add("stderr", err)  # fits the record
    whole = await on.seal(long.spooled())
    digest = hashlib.sha256(out).hexdigest()
    assert whole == [WholeOutput(stream="stdout", bytes=len(out), sha256=digest)]
    await gone(on)
    assert [(p.piece, len(p.data)) for p in services.pieces] == [
        (0, OUTPUT_PIECE_BYTES), (1, OUTPUT_PIECE_BYTES), (2, 5),
    ]  # fmt: skip
    assert services.whole(7) == out
    assert long.kept("stdout") == out[: LIMIT // 2] + out[-LIMIT // 2 :]
    await on.close()


async def test_outages_lose_nothing_and_a_refusal_holds_up_no_other(
    tmp_path: Path, services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outputs, "BACKOFF_MIN_S", 0.01)
    on = made(tmp_path, services)
    services.errors = [Unavailable("away"), Unavailable("away"), InvalidRequest("never")]
    for seq in (1, 2):
        long = logged(on, seq)
        on.folder.mkdir(exist_ok=True)
        long.add("stdout", data(5_000 + seq))
        assert await on.seal(long.spooled())
    on.start()
    await gone(on)
    assert {p.seq for p in services.pieces} == {2} and services.whole(2) == data(5_002)
    await on.close()


async def test_what_an_edge_that_was_killed_had_not_told_the_next_one_tells(
    tmp_path: Path, services: Services
) -> None:
    first = made(tmp_path, services)
    first.folder.mkdir()
    ended, running = logged(first, 1), logged(first, 2)
    ended.add("stderr", data(9_000))
    running.add("stdout", data(9_000))
    assert await first.seal(ended.spooled())
    second = made(tmp_path, services)
    second.start()
    await gone(second)
    assert services.whole(1, "stderr") == data(9_000)
    assert {p.seq for p in services.pieces} == {1}
    assert second.takes(0, 1 << 20)  # nothing is held any more
    await second.close()


async def test_what_is_over_a_bound_or_does_not_fit_the_disk_is_not_kept(
    tmp_path: Path, services: Services
) -> None:
    on = made(tmp_path, services, room=Room(output_bytes=5_000, spool_bytes=8_000))
    on.folder.mkdir()
    too_long, first, second = (logged(on, seq) for seq in (1, 2, 3))
    for _ in range(6):
        too_long.add("stdout", data(1_000))
    assert not list(on.folder.iterdir())
    first.add("stdout", data(4_500))
    second.add("stdout", data(4_500))  # with the first it is more than the node may hold
    assert await on.seal(too_long.spooled()) == []
    assert len(await on.seal(first.spooled())) == 1
    assert await on.seal(second.spooled()) == []
    on.folder = tmp_path / "missing"
    nowhere = logged(on, 4)
    nowhere.add("stdout", data(2_000))
    assert await on.seal(nowhere.spooled()) == []
    assert nowhere.kept("stdout") == data(2_000)[:500] + data(2_000)[-500:]


def test_the_recorded_reply_refers_to_it() -> None:
    whole = [WholeOutput(stream="stdout", bytes=5_000, sha256="a" * 64)]
    kept = Logged(1, limit=LIMIT)
    kept.add("stdout", data(5_000))
    kept.whole = whole
    op: Any = SimpleNamespace(streamed={"o": 5_000, "e": 0}, logged=kept)
    reply = ExecReply(op_id=ids.new(), exit_code=0)
    found = msgspec.json.decode(outcomes.recorded(op, reply, b""), type=ExecReply)
    assert found.whole == whole and found.truncated == (4_000, 0)
