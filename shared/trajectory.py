"""A trajectory record as the services hand it on: request and reply stay the bytes they
came in.

Owns: that form of :class:`schemas.trajectory.TrajectoryRecord`, and pages of a bounded
size. Does not own: the message.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from schemas.trajectory import TRAJECTORY_PAGE_BYTES

NONE = msgspec.Raw(b"null")


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The fields of ``TrajectoryRecord``."""

    uid: str
    project: str
    seq: int
    op_id: str
    verb: str
    principal: str
    at: float
    lane: str | None = None
    step: int | None = None
    request: msgspec.Raw = NONE
    cut: int = 0
    ended_at: float | None = None
    reply: msgspec.Raw = NONE
    begun_at: float | None = None

    @property
    def size(self) -> int:
        """Bytes, about."""
        reply = 0 if self.reply is NONE else len(memoryview(self.reply))
        return len(memoryview(self.request)) + reply + 300


class Records(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of ``TrajectoryRecords``."""

    node: str
    records: list[Record]
    v: int = 1


class Page(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The fields of ``TrajectoryPage``."""

    records: list[Record]
    more: bool = False
    last: int = 0
    op_id: str | None = None
    v: int = 1


def page_of(found: Iterable[Record], limit: int) -> tuple[list[Record], bool]:
    """As many as make a page, and whether there are more."""
    records: list[Record] = []
    left = TRAJECTORY_PAGE_BYTES
    for record in found:
        if len(records) >= limit or (records and record.size > left):
            return records, True
        records.append(record)
        left -= record.size
    return records, False
