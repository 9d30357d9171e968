"""What a script was told by something outside of its sandbox: asked once, then recorded.

Owns: the form of a note, whose answer it is. Does not own: places of calls and when to ask
(:mod:`libdsec.forward`).
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import zlib
from collections.abc import Callable
from typing import Any

import msgspec

from libdsec._log import Entry
from libdsec._portal import on_portal
from libdsec._wire import NOTE_BYTES
from libdsec.errors import InternalError, InvalidRequest

ANSWER_BYTES = 64 << 20
"""JSON of an answer, before it is deflated to at most ``NOTE_BYTES``."""

Asked = Callable[[Any], Any]
"""Takes the question; an async function, or a plain one."""


def about(question: Any) -> str:
    """What tells a question from others. Raises ``InvalidRequest`` where it is no JSON."""
    return hashlib.sha256(_json(question, "question")).hexdigest()


def packed(answer: Any) -> bytes:
    """The content of a note. Raises ``InvalidRequest`` where the answer is no JSON, or too
    long."""
    text = _json(answer, "answer")
    data = zlib.compress(text) if len(text) <= ANSWER_BYTES else b""
    if not 0 < len(data) <= NOTE_BYTES:
        raise InvalidRequest(
            f"an answer of {len(text)} bytes: deflated at most {NOTE_BYTES} are kept of one, "
            f"and {ANSWER_BYTES} before", field="answer",
        )  # fmt: skip
    return data


def unpacked(data: bytes) -> Any:
    """The answer in a note."""
    try:
        inflate = zlib.decompressobj()
        text = inflate.decompress(data, ANSWER_BYTES)
        if not inflate.eof:
            raise InternalError("a note's end is missing")
        return msgspec.json.decode(text)
    except (zlib.error, msgspec.DecodeError) as exc:
        raise InternalError(f"a note cannot be read: {exc}") from exc


def answer_of(entry: Entry | None) -> bytes | None:
    """The content of the note in a record; ``None`` where there is none. A note is complete
    with its intent."""
    record = entry.record if entry is not None else None
    if record is None or record.verb != "note" or record.request is None:
        return None
    try:
        return msgspec.convert(record.request.get("data"), bytes)
    except msgspec.ValidationError:
        return None


async def told(asked: Asked, question: Any) -> Any:
    """What it says. A plain function that was given to the synchronous face runs in a
    thread: it may wait."""
    if inspect.iscoroutinefunction(asked) or not on_portal():
        answer = asked(question)
    else:
        answer = await asyncio.to_thread(asked, question)
    return await answer if inspect.isawaitable(answer) else answer


def _json(value: Any, field: str) -> bytes:
    try:
        return msgspec.json.encode(value, order="deterministic")
    except (TypeError, ValueError, RecursionError) as exc:
        raise InvalidRequest(f"the {field} is no JSON: {exc}", field=field) from exc
