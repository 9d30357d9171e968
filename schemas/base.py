"""What all messages share: the base type, bounds, the wire form of an error.

Owns: encoding and decoding with typed errors. Does not own: any message.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, TypeVar, get_type_hints

import msgspec

VERSION = 1

HEADER_REPLY = "Dsec-Reply"
"""Where the answer to a stored request goes: a subject of the client's own inbox."""
HEADER_TRACE = "traceparent"
"""W3C trace context."""
HEADER_FRAME = "Dsec-Frame"
"""Kind of a frame of an operation's stream, see :mod:`schemas.exec`."""
HEADER_OP = "Dsec-Op"
"""Operation id of a frame from client to edge."""

# `(?!\n)`: Python's `$` also matches before a last newline, which must never get into
# a subject; JSON Schema's dialect has no `\Z`
Uid = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-z]{26}$(?!\n)", description="ULID, lower case")]
Token = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$(?!\n)",
        description="One token of a subject: lower case letters, digits, inner hyphens",
    ),
]
UnixTime = Annotated[float, msgspec.Meta(description="Seconds since the epoch")]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=31_536_000)]


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of every wire type. Unknown fields are ignored, so that a newer sender
    may add optional ones."""


class Versioned(Message, frozen=True, kw_only=True):
    """A message that stands alone on the bus. ``v`` is its version."""

    v: int = VERSION


class WireError(Message, frozen=True):
    """An error as it travels. ``code`` is one of the closed set."""

    code: str
    message: str
    field: str | None = None
    retryable: bool = False
    cause: str | None = None
    is_infra: bool = False
    retry_after_s: float | None = None
    details: dict[str, Any] = {}


class ErrorReply(Versioned, frozen=True):
    """The answer to a request that was refused as a whole."""

    error: WireError
    request_id: str | None = None


class Ok(Versioned, frozen=True):
    """An answer that says only: done."""


M = TypeVar("M")

_encoder = msgspec.json.Encoder()


def encode(message: Any) -> bytes:
    """JSON bytes of a message."""
    return _encoder.encode(message)


PORTION_BYTES = 512 * 1024
"""Of a list that is cut into messages: half of what a NATS server takes unasked."""


def portions(items: Iterable[bytes], *, count: int) -> Iterator[list[bytes]]:
    """Encoded items in their order, as many at a time as one message should carry: up to
    ``count``, and ``PORTION_BYTES`` unless one alone is larger."""
    portion: list[bytes] = []
    size = 0
    for item in items:
        if portion and (len(portion) == count or size + len(item) > PORTION_BYTES):
            yield portion
            portion, size = [], 0
        portion.append(item)
        size += len(item) + 1
    if portion:
        yield portion


KEY_CHARS_MAX = 64
"""Of a map's key in the name of a field."""


class BadMessage(ValueError):
    """A body that is not the message it should be. ``field`` is a dotted path,
    ``version`` the one found when it is not ours."""

    def __init__(
        self, message: str, *, field: str | None = None, version: int | None = None
    ) -> None:
        super().__init__(message)
        self.field = field
        self.version = version


class _VersionOnly(msgspec.Struct):
    v: int = VERSION


_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}


def decode(data: bytes, type_: type[M]) -> M:
    """The message in ``data``. Raises :class:`BadMessage` naming the field."""
    decoder = _decoders.get(type_)
    if decoder is None:
        decoder = _decoders[type_] = msgspec.json.Decoder(type_)
    try:
        message = decoder.decode(data)
    except msgspec.DecodeError as exc:
        raise _bad(data, exc, type_) from exc
    except RecursionError as exc:
        raise BadMessage("the body is nested too deeply") from exc
    if getattr(message, "v", VERSION) != VERSION:
        raise _version(message.v)
    return message  # type: ignore[no-any-return]


def _version(found: int) -> BadMessage:
    text = f"message version {found} is not supported, this side speaks {VERSION}"
    return BadMessage(text, field="v", version=found)


def misfit(exc: msgspec.ValidationError, type_: Any, given: Any) -> tuple[str, str | None]:
    """What of ``given`` does not fit ``type_``, and where: a dotted path, in which an entry
    of a map has its key."""
    text, _, path = str(exc).partition(" - at `")
    by_key = path.startswith("key` in `")
    path = path.removeprefix("key` in `").rstrip("`").removeprefix("$").removeprefix(".")
    name, within, rest = path.partition("[...]")
    named = isinstance(given, dict) and isinstance(type_, type)  # a struct, not a union or list
    entries = given.get(name) if named else None
    if isinstance(entries, dict) and (within or by_key):
        path = f"{name}.{_odd(entries, get_type_hints(type_, include_extras=True)[name])}{rest}"
    return text, path.replace("[...]", "").removeprefix(".") or None


def _odd(entries: dict[Any, Any], hint: Any) -> str:
    """The key of the first entry that does not fit."""
    for key, value in entries.items():
        try:
            msgspec.convert({key: value}, hint)
        except msgspec.ValidationError:
            return str(key)[:KEY_CHARS_MAX]
    return ""


def _bad(data: bytes, exc: msgspec.DecodeError, type_: Any) -> BadMessage:
    try:  # a future version explains a failing body better than its fields do
        found = msgspec.json.decode(data, type=_VersionOnly).v
    except (msgspec.DecodeError, RecursionError):
        found = VERSION
    if found != VERSION:
        return _version(found)
    text = str(exc)
    if not isinstance(exc, msgspec.ValidationError):
        return BadMessage(f"the body is not JSON: {text}")
    try:
        given = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError):
        given = None
    message, path = misfit(exc, type_, given)
    parts = [path]
    if message.startswith("Object "):  # "missing required field `x`"
        parts.append(message.split("`")[1])
    name = ".".join(part for part in parts if part) or None
    return BadMessage(message, field=name)
