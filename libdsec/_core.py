"""What every object of one client shares: the link and what goes over it.

Owns: opening and closing them in order, look-ups of sandboxes, background work
that outlives a call, which sandboxes die with the client. Does not own: the calls
that users see.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import weakref
from collections.abc import AsyncIterator, Coroutine, Iterable
from typing import Any

from libdsec import _ids
from libdsec._calls import CHANGE_S, Calls
from libdsec._door import Operations
from libdsec._link import Link
from libdsec._operation import Operation
from libdsec._wire import (
    ItemResult,
    OpReply,
    SandboxInfo,
    SandboxOpRequest,
    SandboxPage,
    SandboxQuery,
)
from libdsec.config import Config
from libdsec.errors import DSecError, NotFound, SandboxDied, Unavailable, from_wire

log = logging.getLogger("libdsec")

TERMINAL = frozenset({"stopped", "failed", "rejected", "lost"})
CLOSE_S = 10.0
"""Bound of the stops and of the background work that a close waits for."""
PAGE = 1000
STOP_BATCH = 5_000


class Core:
    """One client's connection and bookkeeping."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.link = Link(config, secrets.token_hex(6))
        self.calls = Calls(self.link)
        self.operations = Operations(self.link)
        self.owned: dict[str, str] = {}
        """uid → project of sandboxes that end with the client."""
        self.dialled: weakref.WeakSet[Operation[Any]] = weakref.WeakSet()
        """Connections: nobody else comes back for them."""
        self._closed = False
        self._background: set[asyncio.Task[Any]] = set()
        self.link.on_refused = self._refused
        self.link.on_denied = self._denied
        self.link.on_up = self.operations.reattach

    def _refused(self, subject: str, error: DSecError) -> None:
        self.calls.refuse(subject, error)
        self.operations.refuse(subject, error)

    def _denied(self, error: DSecError) -> None:
        self.calls.fail_all(error)
        self.operations.fail_all(error)

    async def open(self, timeout_s: float) -> None:
        """Connects. Raises ``Unauthenticated`` or ``Unavailable``."""
        await self.link.open(timeout_s)

    async def close(self) -> None:
        """Stops owned sandboxes, finishes compensations, disconnects."""
        try:
            await self._stop_owned()
            if self._background:
                await asyncio.wait(self._background, timeout=CLOSE_S)
        finally:
            self._closed = True
            for task in self._background:
                task.cancel()
            await self._hang_up()
            self.calls.fail_all(Unavailable("the client is closed", retryable=False))
            self.operations.close()
            await self.link.close()

    async def _hang_up(self) -> None:
        with contextlib.suppress(DSecError):
            for operation in list(self.dialled):
                await operation.cancel()

    async def _stop_owned(self) -> None:
        by_project: dict[str, list[str]] = {}
        for uid, project in self.owned.items():
            by_project.setdefault(project, []).append(uid)
        self.owned.clear()
        for project, uids in by_project.items():
            try:
                await self.operate("stop", project, uids, timeout_s=CLOSE_S, cause="cancelled")
            except DSecError as exc:
                log.warning("%d sandboxes may be left in %s: %s", len(uids), project, exc)

    def background(self, work: Coroutine[Any, Any, Any]) -> None:
        """Runs ``work`` beyond the call that asked for it. A closed client has already
        stopped what was its own, and can do no more."""
        if self._closed:
            work.close()
            return
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def operate(
        self,
        verb: str,
        project: str,
        uids: Iterable[str],
        *,
        timeout_s: float = CHANGE_S,
        **facts: Any,
    ) -> dict[str, DSecError | str]:
        """Stop, pause, resume or set_timeout: uid → its state, or its error."""
        todo, found = list(uids), dict[str, DSecError | str]()
        for start in range(0, len(todo), STOP_BATCH):
            part = todo[start : start + STOP_BATCH]
            request = SandboxOpRequest(request_id=_ids.new(), uids=part, **facts)
            found |= await self._operate(verb, project, request, timeout_s)
        return found

    async def _operate(
        self, verb: str, project: str, request: SandboxOpRequest, timeout_s: float
    ) -> dict[str, DSecError | str]:
        subject = self.calls.req_subject(project, "sandbox", verb)
        found: dict[str, DSecError | str] = {}

        def take(reply: OpReply) -> None:
            found.update((r.uid, _outcome(verb, r)) for r in reply.results)

        take(
            await self.calls.change(
                subject, request, OpReply, timeout_s=timeout_s,
                done=lambda reply: reply.last, progress=take,
            )
        )  # fmt: skip
        return found

    async def operate_where(
        self, verb: str, *, job: str | None, labels: dict[str, str], **facts: Any
    ) -> dict[str, DSecError | str]:
        """As :meth:`operate`, for all of a job or all that carry labels."""
        request = SandboxOpRequest(request_id=_ids.new(), job=job, labels=labels, **facts)
        return await self._operate(verb, self.config.project, request, CHANGE_S)

    async def sandboxes(self, query: SandboxQuery, project: str) -> AsyncIterator[SandboxInfo]:
        """All sandboxes of a query, page by page."""
        subject = self.calls.get_subject(project, "sandbox", "list")
        after: str | None = None
        while True:
            page = await self.calls.read(subject, _page(query, after), SandboxPage)
            for found in page.sandboxes:
                yield found
            after = page.next
            if after is None:
                return

    async def lookup(self, uid: str, project: str) -> SandboxInfo | None:
        """One sandbox as the scheduler knows it, ``None`` where it does not."""
        subject = self.calls.get_subject(project, "sandbox", "get")
        try:
            page = await self.calls.read(subject, SandboxQuery(uids=[uid]), SandboxPage)
        except NotFound:
            return None
        return next((s for s in page.sandboxes if s.uid == uid), None)


def _outcome(verb: str, result: ItemResult) -> DSecError | str:
    """A stop wants the end, whichever: that a sandbox failed, or never ran, is no
    failure of the stop."""
    if result.error is None:
        return result.state
    over = result.state in TERMINAL and result.error.code != "not_found"
    return result.state if verb == "stop" and over else from_wire(result.error)


def _page(query: SandboxQuery, after: str | None) -> SandboxQuery:
    return SandboxQuery(
        uids=query.uids,
        request_id=query.request_id,
        job=query.job,
        labels=query.labels,
        states=query.states,
        node=query.node,
        after=after,
        limit=PAGE,
    )


def death(found: SandboxInfo) -> DSecError | None:
    """The error of a sandbox that ended, ``None`` for one that lives."""
    if found.state not in TERMINAL:
        return None
    if found.error is not None:
        return from_wire(found.error)
    return died(found.uid, found.state, found.cause, found.is_infra, found.message)


def died(
    name: str, state: str, cause: str | None, is_infra: bool, message: str = ""
) -> SandboxDied:
    """``SandboxDied`` in words."""
    text = f"sandbox {name} is {state}" + (f" ({cause})" if cause else "")
    if message:
        text += f": {message}"
    return SandboxDied(text, cause=cause, is_infra=is_infra)
