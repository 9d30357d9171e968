"""Messages of the bus itself: dead letters."""

from __future__ import annotations

from schemas.base import UnixTime, Versioned


class DeadLetter(Versioned, frozen=True):
    """A message that was given up, on ``dsec.dlq.v1.<stream>``. ``body`` is the
    original, cut at 64 KiB; ``size_bytes`` its whole size."""

    stream: str
    subject: str
    durable: str
    stream_seq: int
    deliveries: int
    cause: str
    at: UnixTime
    body: bytes = b""
    size_bytes: int = 0
