"""Records that no message takes as they are: what is left of them, and that they say so."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from schemas.base import encode
from schemas.exec import ExecReply, FileReply
from services.edge.journal.fitting import fitted, room
from shared import ids
from shared.trajectory import NONE, Record

OP = ids.derived("op")
LIMIT = 64_000


def record(verb: str, request: bytes = b"{}", reply: bytes | None = None) -> Record:
    return Record(
        uid=ids.derived("uid"), project="team", seq=1, op_id=OP, verb=verb, principal="p" * 26,
        at=1.0, request=msgspec.Raw(request), reply=msgspec.Raw(reply) if reply else NONE,
        ended_at=2.0 if reply else None,
    )  # fmt: skip


def test_what_fits_stays_as_it_is() -> None:
    whole = record("exec", b'"' + b"x" * 20_000 + b'"', encode(ExecReply(op_id=OP, stdout=b"x")))
    assert fitted(whole, LIMIT) is whole


def test_a_large_request_goes_before_any_of_the_reply() -> None:
    reply = encode(ExecReply(op_id=OP, stdout=b"x" * 30_000))
    request = b'"' + b"x" * 30_000 + b'"'
    short = fitted(record("exec", request, reply), LIMIT)
    assert (bytes(short.request), short.cut) == (b"null", len(request))
    assert bytes(short.reply) == reply


@pytest.mark.parametrize(
    ("out", "err"),
    [(100_000, 0), (0, 100_000), (100_000, 100_000), (100_000, 500), (500, 100_000)],
)
def test_of_outputs_head_and_tail_are_left_and_the_rest_is_counted(out: int, err: int) -> None:
    stdout, stderr = bytes(n % 251 for n in range(out)), bytes(n % 241 for n in range(err))
    reply = ExecReply(op_id=OP, exit_code=3, stdout=stdout, stderr=stderr, truncated=(7, 9))
    short = fitted(record("exec", b'{"shell":"x"}', encode(reply)), LIMIT)
    assert LIMIT - 3_000 < len(msgspec.json.encode(short)) <= LIMIT
    assert bytes(short.request) == b'{"shell":"x"}'
    left = msgspec.json.decode(short.reply, type=ExecReply)
    assert left.exit_code == 3
    dropped = (out - len(left.stdout) + 7, err - len(left.stderr) + 9)
    assert left.truncated == dropped
    for whole, kept in ((stdout, left.stdout), (stderr, left.stderr)):
        half = len(kept) // 2
        assert whole.startswith(kept[: len(kept) - half]) and whole.endswith(kept[-half or None :])
        assert len(kept) == len(whole) or len(kept) > 10_000, "each has its half at least"


def test_content_that_was_read_is_left_out() -> None:
    reply = FileReply(op_id=OP, data=b"x" * 100_000, size=100_000)
    left = msgspec.json.decode(
        fitted(record("file_read", reply=encode(reply)), LIMIT).reply, type=FileReply
    )
    assert (left.data, left.entries, left.entry, left.size) == (None, None, None, 100_000)


@pytest.mark.parametrize(("verb", "value"), [("note", "x"), ("exec", "error")])
def test_what_cannot_be_shortened_is_named_by_its_size(verb: str, value: Any) -> None:
    message = {"code": "internal", "message": "x" * 100_000}
    body = msgspec.json.encode({"op_id": OP, "v": 1, value: message})
    short = fitted(record(verb, reply=body), LIMIT)
    left = msgspec.json.decode(short.reply)
    assert left["error"]["field"] == "payload" and str(len(body)) in left["error"]["message"]
    assert len(msgspec.json.encode(short)) < LIMIT


def test_outputs_have_room_beside_the_request() -> None:
    for limit, request in ((1 << 20, 256 << 10), (1 << 20, 0), (8 << 20, 1 << 20)):
        each = room(limit, request)
        full = ExecReply(op_id=OP, stdout=b"x" * each, stderr=b"y" * each)
        one = record("exec", b'"' + b"x" * max(request - 2, 0) + b'"', encode(full))
        assert fitted(one, limit) is one
    assert room(1_000, 5_000) == 1
