"""What the journal forgets: what is too old, or too much.

Owns: how long and how many of each. Does not own: when (:mod:`journal`), the tables
(:mod:`records`).
"""

from __future__ import annotations

from services.edge.journal.records import TOLD, Change

TOMBSTONE_S = 24 * 3_600.0
"""As long as the stream may deliver a start again."""
MAX_TOMBSTONES = 1_000_000
EXEC_S = 24 * 3_600.0
MAX_EXECS = 300_000
MAX_EXEC_BYTES = 1 << 30
"""Results kept for repetition and the trajectory log; the oldest go first. A client that is cut
off for minutes, while others have every turn of its node, finds its own."""
SHED_EXECS = 10_000
"""Surplus that goes in one transaction: so many rows take a tenth of a second, in which every
command waits that finds no room for its intent."""


def prune(now: float) -> list[Change]:
    """Drops what is too old or too much."""
    return [
        ("delete from op where uid not in (select uid from sandbox)", ()),
        ("delete from timing where uid not in (select uid from sandbox)", ()),
        ("delete from tombstone where at < ?", (now - TOMBSTONE_S,)),
        (_KEEP_NUMBERS, ()),
        (_ENDED, ()),
        ("delete from exec where at < ?", (now - EXEC_S,)),
        (_TOMBSTONES, (MAX_TOMBSTONES,)),
        shed(),
        (_LARGEST, (MAX_EXEC_BYTES, MAX_EXEC_BYTES)),
    ]


def shed() -> Change:
    """Drops results that are too many, some at a time."""
    return _SURPLUS, (MAX_EXECS, SHED_EXECS)


_TOMBSTONES = (
    "delete from tombstone where at <= "
    "(select at from tombstone order by at desc limit 1 offset ?)"
)
_SURPLUS = (
    "delete from exec where at <= min((select at from exec order by at desc limit 1 offset ?), "
    "coalesce((select at from exec order by at limit 1 offset ?), 9e99))"
)
_KEEP_NUMBERS = (
    "update sandbox set seq = max(seq, "
    "coalesce((select max(seq) from exec where exec.uid = sandbox.uid), 0))"
)
_ENDED = f"delete from exec where seq > 0 and uid not in (select uid from sandbox) and {TOLD}"
_LARGEST = (  # all rows are added up only in a file that may hold so much
    "delete from exec where at <= case when "
    "(select page_count * page_size from pragma_page_count, pragma_page_size) > ? then "
    "(select at from (select at, "
    "sum(coalesce(length(reply), 0) + coalesce(length(record), 0)) over (order by at desc) as size "
    "from exec) where size > ? order by at desc limit 1) end"
)
