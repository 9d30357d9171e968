"""A sandbox as the door knows it: where it is, what is begun in it, why it is over.

Owns: starting operations, judging their errors. Does not own: what users call
(:mod:`libdsec.sandbox`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from libdsec import _ids, counting
from libdsec._core import TERMINAL, Core, death
from libdsec._operation import Operation
from libdsec._wire import (
    HEADER_LEASE,
    ExecReply,
    ExecRequest,
    SandboxInfo,
    StandingReply,
    StandingRequest,
)
from libdsec.errors import Conflict, DSecError, NotFound, SandboxDied, from_wire
from libdsec.process import OnOutput, Stdin, collect
from libdsec.results import ExecResult

OPERATE_S = 60.0
STAND_S = 5.0
"""How long a node may take for a pause or a resume before the scheduler is asked."""

R = TypeVar("R", bound=msgspec.Struct)


class Held:
    """What every handle of a sandbox has inside."""

    _lease: str | None = None
    """The verifier's lease that its calls are made under."""
    _time_up: str | None = None

    def __init__(
        self,
        core: Core,
        uid: str,
        *,
        project: str,
        state: str,
        id: str | None = None,
        node: str | None = None,
        job: str | None = None,
        labels: Mapping[str, str] | None = None,
        spec: Mapping[str, Any] | None = None,
    ) -> None:
        self._core = core
        self._node = node
        self._id = id
        self._spec = spec
        """What it was made of, where that is known: it stays what it was."""
        self._turns: dict[str, list[Operation[ExecReply]]] = {}  # by session, in order
        self.uid = uid
        self.project = project
        self.state = state
        self.job = job
        self.labels = dict(labels or {})

    async def _ready(self) -> None:
        raise NotImplementedError

    async def _command(
        self, request: ExecRequest, *, joining: int | None = None
    ) -> Operation[ExecReply]:
        """A started command. Those of a session are known until they are over."""
        operation = await self._start("exec", request, ExecReply, joining=joining)
        if request.session is not None:
            turns = self._turns.setdefault(request.session, [])
            turns[:] = [o for o in turns if not o.done] + [operation]
        return operation

    async def _run(
        self,
        request: ExecRequest,
        *,
        stdin: Stdin | None = None,
        on_output: OnOutput | None = None,
    ) -> ExecResult:
        operation = await self._command(request)
        try:
            return await collect(
                operation,
                stdin=stdin,
                timeout_s=request.timeout_s if request.session is None else None,
                on_output=on_output,
            )
        except DSecError as exc:
            raise await self._judged(exc) from exc.__cause__

    async def _start(
        self, verb: str, request: Any, reply_type: type[R], *, joining: int | None = None,
        kind: type[Operation[R]] = Operation,
    ) -> Operation[R]:  # fmt: skip
        """A started operation at the sandbox's edge."""
        if self._node is None:
            await self._ready()
        if self._node is None:
            raise NotFound(f"sandbox {self._id or self.uid} has no node")
        operation = kind(
            self._core.operations,
            (self.project, self._node, self.uid),
            verb=verb,
            request=request,
            reply_type=reply_type,
            verdict=self._verdict,
            joining=joining,
        )
        if self._lease is not None:
            operation.marks = {HEADER_LEASE: self._lease}
        await operation.start()
        return operation

    async def _answer(self, verb: str, request: Any, reply_type: type[Any]) -> Any:
        """The final reply of an operation without streams."""
        operation: Any = await self._start(verb, request, reply_type)
        try:
            reply = await operation.final()
        except BaseException:
            operation.abandon()
            raise
        if reply.error is not None:
            raise await self._judged(from_wire(reply.error))
        return reply

    async def _operate(self, verb: str, *, timeout_s: float = OPERATE_S, **facts: Any) -> None:
        results = await self._core.operate(
            verb, self.project, [self.uid], timeout_s=timeout_s, **facts
        )
        outcome = results.get(self.uid)
        if isinstance(outcome, DSecError):
            raise await self._judged(outcome)
        if outcome is not None:
            self.state = outcome

    async def _stand(self, verb: str) -> None:
        """A pause or a resume, by its node; where that is silent by the scheduler, which
        has it done when the node is back."""
        if self._node is None:
            return await self._operate(verb)
        request = StandingRequest(op_id=_ids.new())
        try:
            async with asyncio.timeout(STAND_S):
                reply: StandingReply = await self._answer(verb, request, StandingReply)
        except TimeoutError:
            return await self._operate(verb)
        if reply.failure is not None:
            raise from_wire(reply.failure)
        self.state = reply.state

    async def _verdict(self) -> DSecError | None:
        """Why it is over, ``None`` while it lives."""
        found = await self._core.lookup(self.uid, self.project)
        if found is None:
            return NotFound(f"there is no sandbox {self._id or self.uid}")
        self._seen(found)
        return death(found)

    async def _judged(self, error: DSecError) -> DSecError:
        """An error from the edge in the light of what the services know: a sandbox
        that is not there, or died under a command, has a cause."""
        if not isinstance(error, SandboxDied) and type(error) not in (NotFound, Conflict):
            return error
        if isinstance(error, SandboxDied) and error.cause is not None:
            return error
        try:
            return await self._verdict() or error
        except DSecError:
            return error

    def _seen(self, found: SandboxInfo) -> None:
        if found.state in TERMINAL and self.state not in TERMINAL and found.is_infra:
            counting.count("lost", "sandbox")
        self.state, self.job, self.labels = found.state, found.job, dict(found.labels)
        self._id, self._node = found.id or self._id, found.node or self._node
        self._time_up = found.time_up
        if found.state in TERMINAL:
            self._core.owned.pop(self.uid, None)
