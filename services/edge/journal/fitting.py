"""A record of the trajectory log that one message of the bus takes. Pure.

Owns: what is left out of a record that is too large, and that it says so. Does not own:
how much of an output is kept in the first place (logged), the bus's limit (link).
"""

from __future__ import annotations

import msgspec

from schemas.base import encode
from schemas.exec import ExecReply, FileReply
from shared.errors import InvalidRequest
from shared.trajectory import NONE, Record
from shared.wire import to_wire

ENVELOPE_BYTES = 2_048
"""Of a message beside a record's request and reply."""
_REQUEST_SHARE = 4
"""A request of more than one in so many bytes of the room is named by its size."""


def room(limit: int, request_bytes: int) -> int:
    """Bytes of each stream of output that a record has room for in a message of ``limit``
    bytes: two of them as base64, beside the request and the rest of the reply. At least
    one, so that what has none goes as a whole."""
    return max((limit - request_bytes - 2 * ENVELOPE_BYTES) * 3 // 8, 1)


def fitted(record: Record, limit: int) -> Record:
    """The record itself where a message of ``limit`` bytes takes it. Else one that it takes:
    the request is named by its size (``cut``), of outputs head and tail are left and the
    rest is counted (``truncated``), content that was read is left out, as that of a read
    that was too large from the start."""
    most = limit - ENVELOPE_BYTES
    if record.size <= most:
        return record
    size = len(memoryview(record.request))
    if size > most // _REQUEST_SHARE:
        record = msgspec.structs.replace(record, request=NONE, cut=size)
    if record.size <= most:
        return record
    left = most - (record.size - len(memoryview(record.reply)))
    return msgspec.structs.replace(record, reply=msgspec.Raw(_reply(record, left)))


def _reply(record: Record, most: int) -> bytes:
    body = memoryview(record.reply)
    found = b""
    if record.verb == "exec":
        found = encode(_shorter(msgspec.json.decode(body, type=ExecReply), most))
    elif record.verb.startswith("file_"):
        reply = msgspec.json.decode(body, type=FileReply)
        found = encode(msgspec.structs.replace(reply, data=None, entries=None, entry=None))
    if found and len(found) <= most:
        return found
    error = InvalidRequest(f"a reply of {len(body)} bytes is over the bus's limit", field="payload")
    return msgspec.json.encode({"v": 1, "op_id": record.op_id, "error": to_wire(error)})


def _shorter(reply: ExecReply, most: int) -> ExecReply:
    bare = msgspec.structs.replace(reply, stdout=b"", stderr=b"")
    data = max(most - len(encode(bare)) - 64, 0) * 3 // 4  # digits of what was dropped
    out, err = len(reply.stdout), len(reply.stderr)
    out = min(out, max(data // 2, data - err))
    err = min(err, data - out)
    dropped = len(reply.stdout) - out, len(reply.stderr) - err
    return msgspec.structs.replace(
        reply, stdout=_ends(reply.stdout, out), stderr=_ends(reply.stderr, err),
        truncated=(reply.truncated[0] + dropped[0], reply.truncated[1] + dropped[1]),
    )  # fmt: skip


def _ends(data: bytes, most: int) -> bytes:
    """Head and tail, as :class:`services.edge.journal.logged.Logged` keeps them."""
    tail = most // 2
    return data if len(data) <= most else data[: most - tail] + data[len(data) - tail :]
