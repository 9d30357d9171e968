"""A sandbox in the hands of who judges it: a lease that holds its end off.

Owns: taking, renewing and giving back the lease, calls under it. Does not own: the verdict
(:mod:`libdsec.verify`). The node keeps the lease; it ends by itself when its holder is
silent for ``lease_s`` seconds, so a verifier that dies holds nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time

from libdsec import _ids
from libdsec._wire import LEASE_MAX_S, LeaseReply, LeaseRequest
from libdsec.errors import Conflict, DSecError, InvalidRequest, Unavailable
from libdsec.sandbox import Sandbox

log = logging.getLogger("libdsec")

RENEWALS = 3
"""Renewals within one lease."""
MIN_S = 1.0
LOOK_S = 1.0
"""Between two looks at another verifier's lease."""
RENEWED_S = 0.5
"""A lease that ends so much later than it was to end is held by somebody alive."""


class Verifying(Sandbox):
    """The same sandbox for a verifier. Its calls are let in where only those of the lease
    are: when a time limit has ended the agent's work, and after :meth:`alone`. ``lost``: why
    the lease is not held any more, where it is not."""

    def __init__(self, sandbox: Sandbox, lease_s: float | None) -> None:
        super().__init__(
            sandbox._core, sandbox.uid, project=sandbox.project, state=sandbox.state,
            id=sandbox._id, node=sandbox._node, job=sandbox.job, labels=sandbox.labels,
        )  # fmt: skip
        if lease_s is None or not MIN_S <= lease_s <= LEASE_MAX_S:
            text = f"a lease is of {MIN_S:g} to {LEASE_MAX_S:g} s"
            raise InvalidRequest(text, field="lease_s")
        self.lease_s = lease_s
        self.lost: DSecError | None = None
        self._lease: str = _ids.new()
        self._until = 0.0
        self._task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"Verifying({self.id!r}, lease_s={self.lease_s:g})"

    async def __aenter__(self) -> Verifying:
        await self._take()
        self._task = asyncio.create_task(self._renew(), name=f"verifier of {self.uid}")
        return self

    async def __aexit__(self, *_exc: object) -> None:
        """Gives the lease back; the sandbox lives on as long as its limits let it."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        with contextlib.suppress(DSecError):
            await self._ask(0.0)

    async def _take(self) -> None:
        """Takes the lease, if need be when that of a verifier that died has run out. Raises
        ``Conflict`` as soon as its holder renews it."""
        ends = math.inf
        while True:
            try:
                return await self._ask(self.lease_s)
            except Conflict as exc:
                now, left_s = time.monotonic(), exc.retry_after_s
                if left_s is None or now + left_s > ends + RENEWED_S:
                    raise
                ends = min(ends, now + left_s)
                await asyncio.sleep(min(left_s, LOOK_S))

    async def alone(self, *, offline: bool = False) -> None:
        """Kills everything that runs in the sandbox, and lets nobody else in until the
        block ends: calls of others raise ``Conflict``. ``offline``: from then on nothing
        leaves the sandbox, also afterwards. May be repeated."""
        await self._ask(self.lease_s, alone=True, offline=offline)

    async def _ask(self, lease_s: float, *, alone: bool = False, offline: bool = False) -> None:
        asked_at = time.monotonic()
        request = LeaseRequest(
            op_id=_ids.new(), lease=self._lease, lease_s=lease_s, alone=alone, offline=offline
        )
        reply: LeaseReply = await self._answer("verify", request, LeaseReply)
        self._until = asked_at + reply.held_s

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self.lease_s / RENEWALS)
            try:
                await self._ask(self.lease_s)
            except Unavailable as exc:  # the node's service may be starting again
                if time.monotonic() < self._until:
                    continue
                self.lost = exc
            except DSecError as exc:
                self.lost = exc
            if self.lost is not None:
                log.warning("%r is lost: %s", self, self.lost)
                return
