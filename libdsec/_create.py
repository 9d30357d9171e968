"""Creating sandboxes: one request, per-item results, nothing left on any way out.

Owns: waiting for every item to settle (answers on the inbox, healed by reading
state), time-outs, and the compensation for what nobody will hold. Does not own:
the objects handed to users.

Whoever is cancelled or runs out of time while the request is under way leaves a
background task that stops every sandbox it asked for. The stop follows the create
on the same stream, and the task looks until the services say that all are over.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from libdsec import _ids
from libdsec._calls import Mailbox, NobodyListens, answer
from libdsec._core import TERMINAL, Core, death, died
from libdsec._wire import (
    CreateReply,
    CreateRequest,
    ItemResult,
    SandboxInfo,
    SandboxQuery,
    encode,
)
from libdsec.errors import DeadlineExceeded, DSecError, Unavailable, from_wire

log = logging.getLogger("libdsec")

CREATE_S = 120.0
"""Default bound of a create."""
HEAL_S = 1.0
"""First read of state when no answer comes; doubles up to MAX_HEAL_S."""
MAX_HEAL_S = 10.0
GRACE_S = 2.0
"""The service gives up at the time limit; its verdict may take this long to come."""
COMPENSATE_S = 60.0
COMPENSATE_READ_S = 0.5
UNSEEN_READS = 4
"""Reads without a trace of the request after its stop was stored: it never came."""
SETTLED = TERMINAL | {"running", "paused"}


@dataclass(frozen=True, slots=True)
class Made:
    """One sandbox of a request: where it is, or why not."""

    uid: str
    state: str
    id: str | None = None
    node: str | None = None
    error: DSecError | None = None


@dataclass
class Creation:
    """The items of one request as they settle. Pure."""

    request_id: str
    total: int
    items: dict[int, Made] = field(default_factory=dict)
    index_of: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        uids = (_ids.item_uid(self.request_id, i) for i in range(self.total))
        self.index_of = {uid: i for i, uid in enumerate(uids)}

    @property
    def settled(self) -> bool:
        """Whether every item has its result."""
        return len(self.items) == self.total

    @property
    def open_uids(self) -> list[str]:
        """uids of the items that have none."""
        return [uid for uid, i in self.index_of.items() if i not in self.items]

    def apply(self, result: ItemResult) -> None:
        """An answer about one item."""
        error = from_wire(result.error) if result.error else None
        if error is None and result.state in TERMINAL:
            error = died(result.id or result.uid, result.state, None, False)
        if result.state in SETTLED or error is not None:
            self._set(Made(result.uid, result.state, result.id, result.node, error))

    def apply_info(self, found: SandboxInfo) -> None:
        """What a read said about one item."""
        if found.state in SETTLED:
            self._set(Made(found.uid, found.state, found.id, found.node, death(found)))

    def _set(self, made: Made) -> None:
        index = self.index_of.get(made.uid)
        if index is not None:
            self.items.setdefault(index, made)

    def expire(self, error: DSecError) -> None:
        """Time is up for what is open."""
        for uid in self.open_uids:
            self._set(Made(uid, "requested", error=error))

    def in_order(self) -> list[Made]:
        """All results."""
        return [self.items[i] for i in range(self.total)]


async def create(
    core: Core,
    specs: Sequence[dict[str, Any]],
    *,
    count: int,
    timeout_s: float,
    request_id: str,
    wait: bool,
    kept: Sequence[bool],
    verb: str = "create",
    project: str | None = None,
) -> list[Made]:
    """The results of one request, in order. Raises where it was refused as a whole.
    What is not ``kept`` (one flag an item) ends with the client."""
    project = project or core.config.project
    creation = Creation(request_id, len(specs) * count)
    known = {uid for uid in creation.index_of if uid in core.owned}
    body = encode(
        CreateRequest(
            request_id=request_id,
            specs=[msgspec.Raw(msgspec.json.encode(s)) for s in specs],
            count=count,
            timeout_s=timeout_s,
        )
    )
    for uid, index in creation.index_of.items():
        if not kept[index]:
            core.owned[uid] = project  # from now on, so that a close meanwhile ends them
    try:
        subject = core.calls.req_subject(project, "sandbox", verb)
        await _request(core, subject, project, creation, body, timeout_s=timeout_s, wait=wait)
    except BaseException as exc:
        _forget(core, set(creation.index_of) - known)
        refused = isinstance(exc, DSecError) and not exc.retryable and not exc.is_infra
        if not refused:  # it may have arrived
            _compensate(core, project, creation, known)
        raise
    _forget(core, {m.uid for m in creation.items.values() if m.error is not None} - known)
    return creation.in_order()


def _forget(core: Core, uids: set[str]) -> None:
    for uid in uids:
        core.owned.pop(uid, None)


async def _request(
    core: Core, subject: str, project: str, creation: Creation, body: bytes, *, timeout_s: float,
    wait: bool,
) -> None:  # fmt: skip
    end = time.monotonic() + timeout_s + GRACE_S
    with core.calls.mailbox(subject) as box:
        await core.calls.store(subject, body, reply_to=box.address, timeout_s=timeout_s)
        if not wait:
            for uid, index in creation.index_of.items():
                creation.items[index] = Made(uid, "requested")
            return
        await _settle(core, project, creation, box, end)
    late = creation.open_uids
    if late:
        creation.expire(DeadlineExceeded(f"not running within {timeout_s:g} s"))
        core.background(compensate(core, project, creation.request_id, late))


async def _settle(core: Core, project: str, creation: Creation, box: Mailbox, end: float) -> None:
    """Answers as they come, reads where they do not, until all settled or ``end``. Before time
    is up for one its state is read: its answer may be lost, or unread by a process that stood
    still."""
    heal_s, heal_at = HEAL_S, time.monotonic() + HEAL_S
    while not creation.settled and time.monotonic() < end:
        try:
            data = await box.next(min(heal_at, end) - time.monotonic())
            for result in answer(data, CreateReply).results:
                creation.apply(result)
        except (TimeoutError, NobodyListens):
            await _heal(core, project, creation, end)
            heal_s = min(heal_s * 2, MAX_HEAL_S)
            heal_at = time.monotonic() + heal_s
    if not creation.settled:
        await _heal(core, project, creation, end)


async def _heal(core: Core, project: str, creation: Creation, end: float) -> None:
    try:
        async with asyncio.timeout(max(end - time.monotonic(), GRACE_S)):
            for found in await _listed(core, project, creation.request_id):
                creation.apply_info(found)
    except (Unavailable, TimeoutError) as exc:
        log.debug("reading the state of %s: %s", creation.request_id, exc)


async def _listed(core: Core, project: str, request_id: str) -> list[SandboxInfo]:
    query = SandboxQuery(request_id=request_id)
    return [found async for found in core.sandboxes(query, project)]


def _compensate(core: Core, project: str, creation: Creation, known: set[str]) -> None:
    """Ends in the background what the caller never got hold of."""
    uids = [uid for uid in creation.index_of if uid not in known]
    if uids:
        core.background(compensate(core, project, creation.request_id, uids))


async def compensate(core: Core, project: str, request_id: str, uids: list[str]) -> None:
    """Stops ``uids`` and looks until they are over. Bounded; never raises."""
    try:
        async with asyncio.timeout(COMPENSATE_S):
            await _stop_until_over(core, project, request_id, set(uids))
    except (DSecError, TimeoutError) as exc:
        log.warning("sandboxes of request %s may be left: %s", request_id, exc)


async def _stop_until_over(core: Core, project: str, request_id: str, uids: set[str]) -> None:
    unseen = 0
    while True:
        try:
            await core.operate("stop", project, sorted(uids), cause="cancelled")
            found = {s.uid: s.state for s in await _listed(core, project, request_id)}
        except DSecError as exc:
            if not exc.retryable:
                raise
            await asyncio.sleep(COMPENSATE_READ_S)
            continue
        states = {uid: found[uid] for uid in uids if uid in found}
        unseen = 0 if states else unseen + 1
        if len(states) == len(uids) and all(s in TERMINAL for s in states.values()):
            return
        if unseen >= UNSEEN_READS:
            return
        await asyncio.sleep(COMPENSATE_READ_S)
