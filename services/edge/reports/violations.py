"""What sandboxes were denied, on its way to audit.

Owns: numbers, batches, the way onto the bus, a bound on what waits without losing a
count. Does not own: noticing (drivers), judging (audit). What waits is in memory: an edge
that dies has not told its last moments.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from itertools import groupby

from msgspec.structs import replace

from schemas.audit import Violation, Violations
from schemas.base import encode
from schemas.subjects import sec
from services.edge.link import Link
from shared.bus import Outgoing
from shared.errors import DsecError, InvalidRequest

log = logging.getLogger(__name__)

WAITING_MAX = 4_096
"""More are added to one that waits already: counts stay exact, details are the newest."""
BATCH_MAX = 512
TURN_S = 1.0
KINDS_PER_TURN = 32
"""Different denials of one sandbox in one turn that are told each."""
SAMPLES_MAX = 16
SUBJECT_CHARS = 1_000
"""Of what no message could carry."""
Key = tuple[str, str, str, str | None]
BACKOFF_S = 0.5


class Waiting:
    """Violations that wait, oldest first. Beyond ``most`` equal ones become one. Pure."""

    def __init__(self, most: int = WAITING_MAX) -> None:
        self._most = most
        self._items: list[Violation] = []

    def __len__(self) -> int:
        return len(self._items)

    def add(self, found: Violation) -> None:
        """Takes one in; a summary of what cannot be kept apart loses no count."""
        if len(self._items) < self._most:
            self._items.append(found)
            return
        same = [n for n, v in enumerate(self._items) if _kin(v) == _kin(found)]
        at = same[-1] if same else len(self._items) - 1
        self._items[at] = merged(self._items[at], found, same=bool(same))

    def take(self, most: int) -> list[Violation]:
        """The oldest ones, of one source and verdict: one message."""
        batch: list[Violation] = []
        for _, group in groupby(self._items[:most], key=lambda v: (v.source, v.verdict)):
            batch = list(group)
            break
        del self._items[: len(batch)]
        return batch

    def put_back(self, batch: list[Violation]) -> None:
        """They were not taken."""
        self._items[:0] = batch


class Repeats:
    """Makes few of many: the first of a kind in a turn is told at once, equal ones are
    added up until its end, and where a sandbox tries too many different things in one
    turn these become one summary. Counts stay exact. Pure."""

    def __init__(self) -> None:
        self._told: dict[str, set[Key]] = {}
        self._more: dict[str, dict[Key, Violation]] = {}

    def add(self, found: Violation) -> Violation | None:
        """What is to be told at once, if anything."""
        key: Key = (found.source, found.verdict, found.rule, found.subject)
        told = self._told.setdefault(found.uid, set())
        if key not in told and len(told) < KINDS_PER_TURN:
            told.add(key)
            return found
        more = self._more.setdefault(found.uid, {})
        if key not in more and key not in told and len(more) >= KINDS_PER_TURN:
            key = (found.source, found.verdict, found.rule, None)
            more[key] = _summed(more.get(key), found)
        else:
            old = more.get(key)
            more[key] = merged(old, found, same=True) if old else found
        return None

    def turn(self) -> list[Violation]:
        """Ends the turn: what was added up."""
        over = [found for more in self._more.values() for found in more.values()]
        self._told.clear()
        self._more.clear()
        return over


def _summed(old: Violation | None, new: Violation) -> Violation:
    if old is None:
        return replace(new, targets=max(1, new.targets), samples=new.samples or [new.subject])
    samples = [*old.samples, *(new.samples or [new.subject])][:SAMPLES_MAX]
    both = merged(old, new, same=True)
    return replace(both, targets=old.targets + max(1, new.targets), samples=samples)


def _kin(found: Violation) -> tuple[str, str, str, str]:
    return found.uid, found.source, found.verdict, found.rule


def merged(old: Violation, new: Violation, *, same: bool) -> Violation:
    """Both as one: the newer one's details, or, where they are of different kinds, the
    older one's, with the newer one's count as ``lost`` details."""
    if not same:
        return replace(old, lost=old.lost + new.count + new.lost)
    return replace(
        new, id=old.id, count=old.count + new.count, lost=old.lost + new.lost,
        first_at=old.first_at or old.at, targets=max(old.targets, new.targets),
    )  # fmt: skip


class Teller:
    """Publishes for one node."""

    def __init__(self, *, node: str, epoch: str, link: Link, now: Callable[[], float]) -> None:
        self._node, self._epoch, self._link, self._now = node, epoch, link, now
        self._waiting = Waiting()
        self._most = BATCH_MAX
        self._number = 0
        self._wake = asyncio.Event()

    def tell(self, found: Violation) -> None:
        """Takes one in, from a driver: without id and node."""
        self._number += 1
        numbered = replace(
            found, id=f"{self._epoch}-{self._number}", node=self._node,
            first_at=found.first_at or found.at or self._now(),
        )  # fmt: skip
        self._waiting.add(numbered)
        self._wake.set()

    async def run(self) -> None:
        """Until cancelled: whatever waits is told at once."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                try:
                    await self._publish()
                except Exception:  # of these; those to come are to be told
                    log.exception("violations are lost")

    async def _publish(self) -> None:
        batch = self._waiting.take(self._most)
        message = Violations(node=self._node, violations=batch)
        subject = sec(batch[0].source, batch[0].verdict, self._node)
        try:
            # what was stored and not acknowledged is stored once, and each has its own id
            await self._link.bus.store(
                [
                    Outgoing(
                        subject, encode(message), msg_id=f"{self._node}-{batch[0].id}-{len(batch)}"
                    )
                ]
            )
        except InvalidRequest as error:  # names are as long as a sandbox makes them
            log.warning("%d violations in parts: %s", len(batch), error.message)
            self._most = max(1, len(batch) // 2)
            self._waiting.put_back(batch if len(batch) > 1 else [_bare(batch[0])])
        except DsecError as error:
            log.debug("violations wait: %s", error.message)
            self._waiting.put_back(batch)
            await asyncio.sleep(BACKOFF_S)
        else:
            self._most = BATCH_MAX


def _bare(found: Violation) -> Violation:
    """What of a violation fits any message."""
    subject, path = found.subject[:SUBJECT_CHARS], found.path[:SUBJECT_CHARS]
    return replace(found, subject=subject, path=path, samples=[], actor={})
