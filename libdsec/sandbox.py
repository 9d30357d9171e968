"""One sandbox as users hold it.

Owns: commands, its life, what is known of it. Does not own: creating and finding
(:mod:`libdsec.client`), files (:mod:`libdsec.files`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import msgspec

from libdsec import _ids
from libdsec._command import attach_request, command_request, shown
from libdsec._core import TERMINAL, Core, death
from libdsec._operation import Operation
from libdsec._wire import (
    INLINE_BYTES,
    ExecReply,
    ExecRequest,
    InfoReply,
    InfoRequest,
    SandboxInfo,
)
from libdsec.args import Seconds, seconds
from libdsec.errors import (
    Conflict,
    DeadlineExceeded,
    DSecError,
    InvalidRequest,
    NotFound,
    SandboxDied,
    from_wire,
)
from libdsec.files import Files
from libdsec.ports import HasPorts
from libdsec.process import OnOutput, Process, checked, collect
from libdsec.results import ExecResult, Info, info_of

OUTPUT_LIMIT_BYTES = 10 * 1024 * 1024
UNLIMITED_BYTES = 1 << 40
READY_S = 120.0
READ_S, MAX_READ_S = 0.1, 2.0
"""Waits between reads of the state of a sandbox that is coming up."""
OPERATE_S = 60.0

R = TypeVar("R", bound=msgspec.Struct)


class Sandbox(HasPorts):
    """A sandbox. ``state`` is the last one seen; :meth:`info` asks. Any call on a
    paused sandbox resumes it. ``async with`` stops it at the end."""

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
    ) -> None:
        self._core = core
        self._node = node
        self._id = id
        self.uid = uid
        self.project = project
        self.state = state
        self.job = job
        self.labels = dict(labels or {})
        self.files = Files(self)

    @classmethod
    def _of(cls, core: Core, found: SandboxInfo) -> Sandbox:
        return cls(
            core,
            found.uid,
            project=found.project,
            state=found.state,
            id=found.id,
            node=found.node,
            job=found.job,
            labels=found.labels,
        )

    def __repr__(self) -> str:
        labels = f", labels={self.labels}" if self.labels else ""
        return f"Sandbox({self.id!r}, state={self.state!r}{labels})"

    @property
    def id(self) -> str:
        """The public id ``<node>-<uid>``; the bare uid before it has a node."""
        return self._id or self.uid

    @property
    def node(self) -> str | None:
        """The node it is on, once known."""
        return self._node

    async def __aenter__(self) -> Sandbox:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.stop()

    # -- commands ----------------------------------------------------------------

    async def run_shell(
        self,
        cmd: str,
        *,
        session: str = "main",
        timeout: Seconds | None = None,
        user: str | None = None,
        check: bool = False,
        on_output: OnOutput | None = None,
        output_limit_bytes: int = OUTPUT_LIMIT_BYTES,
        op_id: str | None = None,
    ) -> ExecResult:
        """Runs ``cmd`` in a shell session that lives on: directory, environment and
        functions persist between calls. ``timeout`` in seconds ends the command, with
        a result (``timed_out``); ``check`` raises ``ExecFailed`` or ``ExecTimeout``."""
        request = command_request(
            (cmd,),
            session=session,
            user=user,
            timeout=timeout,
            output_limit_bytes=output_limit_bytes,
            stream=on_output is not None or output_limit_bytes > INLINE_BYTES,
            op_id=op_id,
        )
        result = await self._run(request, on_output=on_output)
        return checked(result, cmd) if check else result

    async def exec(
        self,
        *command: str | Sequence[str],
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        stdin: bytes | str | None = None,
        timeout: Seconds | None = None,
        idle_timeout: Seconds | None = None,
        output_limit_bytes: int = OUTPUT_LIMIT_BYTES,
        merge: bool = False,
        check: bool = False,
        on_output: OnOutput | None = None,
        op_id: str | None = None,
    ) -> ExecResult:
        """Runs one command, by itself and beside others. One string is a shell
        command line, several (or one sequence) are an argv. ``timeout``: seconds until
        the whole tree is killed; ``idle_timeout``: the same after so long without
        output. ``output_limit_bytes`` bounds each stream: head and tail are kept.
        ``merge`` sends stderr into stdout. The same ``op_id`` never runs twice: a
        repeated call gets the first one's result."""
        data = stdin.encode() if isinstance(stdin, str) else stdin
        inline = data is not None and len(data) <= INLINE_BYTES
        idle_s = seconds(idle_timeout, "idle_timeout")
        request = command_request(
            command,
            cwd=cwd,
            env=env,
            user=user,
            timeout=timeout,
            output_limit_bytes=output_limit_bytes,
            merge=merge,
            stdin_data=data if inline else None,
            stdin=data is not None and not inline,
            stream=on_output is not None or idle_s is not None or output_limit_bytes > INLINE_BYTES,
            op_id=op_id,
        )
        feed = None if inline else data
        result = await self._run(request, stdin=feed, idle_s=idle_s, on_output=on_output)
        return checked(result, shown(request)) if check else result

    async def _run(
        self,
        request: ExecRequest,
        *,
        stdin: bytes | None = None,
        idle_s: float | None = None,
        on_output: OnOutput | None = None,
    ) -> ExecResult:
        operation = await self._start("exec", request, ExecReply)
        try:
            return await collect(
                operation,
                stdin=stdin,
                timeout_s=request.timeout_s,
                idle_timeout_s=idle_s,
                on_output=on_output,
            )
        except DSecError as exc:
            raise await self._judged(exc) from exc.__cause__

    async def spawn(
        self,
        *command: str | Sequence[str],
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        stdin: bool = True,
        timeout: Seconds | None = None,
        output_limit_bytes: int | None = None,
        merge: bool = False,
        session: str | None = None,
        pty: tuple[int, int] | None = None,
        op_id: str | None = None,
    ) -> Process:
        """Starts a command to talk to; arguments as of :meth:`exec`. ``stdin``: whether
        it gets an input. Output is not limited unless ``output_limit_bytes`` says so.
        ``pty`` (rows, columns) puts it on a terminal: one output, keys such as Ctrl-C as
        bytes of input, :meth:`Process.resize`; ``close_stdin`` types end-of-file; when
        this client is gone for a minute, everything on the terminal is killed."""
        limit = UNLIMITED_BYTES if output_limit_bytes is None else output_limit_bytes
        request = command_request(
            command,
            session=session,
            cwd=cwd,
            env=env,
            user=user,
            timeout=timeout,
            output_limit_bytes=limit,
            merge=merge,
            stdin=stdin,
            stream=True,
            pty=pty,
            op_id=op_id,
        )
        operation = await self._start("exec", request, ExecReply)
        return Process(operation, command=shown(request), stdin=stdin)

    async def attach(self, op_id: str, *, offset: int = 0) -> Process:
        """A running or just finished command of the same key or user, by its operation
        id; its streams move here from wherever they went. Output comes from ``offset``
        (bytes of both streams) on, as far as it is retained: the last MiB at least, of
        terminals only what is new after the node's service restarted; what is missing
        is counted in ``truncated``. Raises ``NotFound`` from the process's methods."""
        request = attach_request(op_id, offset)
        operation = await self._start("exec", request, ExecReply, joining=offset)
        return Process(operation, command=f"operation {op_id}", stdin=True)

    # -- the door ----------------------------------------------------------------

    async def _start(
        self, verb: str, request: Any, reply_type: type[R], *, joining: int | None = None,
        kind: type[Operation[R]] = Operation,
    ) -> Operation[R]:  # fmt: skip
        """A started operation at the sandbox's edge."""
        if self._node is None:
            await self.ready()
        if self._node is None:
            raise NotFound(f"sandbox {self.id} has no node")
        operation = kind(
            self._core.operations,
            (self.project, self._node, self.uid),
            verb=verb,
            request=request,
            reply_type=reply_type,
            verdict=self._verdict,
            joining=joining,
        )
        await operation.start()
        return operation

    async def _verdict(self) -> DSecError | None:
        """Why it is over, ``None`` while it lives."""
        found = await self._core.lookup(self.uid, self.project)
        if found is None:
            return NotFound(f"there is no sandbox {self.id}")
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
        self.state, self.job, self.labels = found.state, found.job, dict(found.labels)
        self._id, self._node = found.id or self._id, found.node or self._node
        if found.state in TERMINAL:
            self._core.owned.pop(self.uid, None)

    # -- its life ----------------------------------------------------------------

    async def ready(self, *, timeout: Seconds = READY_S) -> Sandbox:
        """Returns when it runs. Raises why it never will (``SandboxDied``,
        ``CapacityExhausted`` …), or ``DeadlineExceeded``."""
        limit = seconds(timeout, "timeout") or 0.0
        end, wait_s = time.monotonic() + limit, READ_S
        while True:
            found = await self._core.lookup(self.uid, self.project)
            if found is not None:
                self._seen(found)
                dead = death(found)
                if dead is not None:
                    raise dead
                if found.state in ("running", "paused"):
                    return self
            if time.monotonic() >= end:
                raise DeadlineExceeded(f"sandbox {self.id} does not run within {limit:g} s")
            await asyncio.sleep(wait_s)
            wait_s = min(wait_s * 2, MAX_READ_S)

    async def info(self) -> Info:
        """State, node, cause, limits, and (while it lives) usage and enforcement. It
        resumes nothing."""
        found = await self._core.lookup(self.uid, self.project)
        if found is None:
            raise NotFound(f"there is no sandbox {self.id}")
        self._seen(found)
        info = info_of(found)
        if found.state not in ("running", "paused"):
            return info
        try:
            live = await self._live()
        except (NotFound, SandboxDied):  # it ended just now: the services may not know yet
            return info_of(await self._core.lookup(self.uid, self.project) or found)
        return replace(info, usage=dict(live.metrics), enforcement=dict(live.enforcement))

    async def metrics(self) -> dict[str, float]:
        """Live usage: ``cpu_s memory_bytes memory_peak_bytes pids disk_bytes`` and what
        else the backend measures."""
        return dict((await self._live()).metrics)

    async def _live(self) -> InfoReply:
        operation = await self._start("info", InfoRequest(op_id=_ids.new()), InfoReply)
        try:
            reply = await operation.final()
        except BaseException:
            operation.abandon()
            raise
        if reply.error is not None:
            raise await self._judged(from_wire(reply.error))
        return reply

    async def stop(self, *, grace_s: Seconds = 0.0) -> None:
        """Ends it and returns when nothing of it is left. Idempotent. ``grace_s``:
        seconds between asking its processes to end and killing them."""
        if self.state in TERMINAL:
            return
        grace = seconds(grace_s, "grace_s") or 0.0
        await self._operate("stop", timeout_s=OPERATE_S + grace, grace_s=grace)
        self._core.owned.pop(self.uid, None)

    async def pause(self) -> None:
        """Freezes it; its memory may be reclaimed. Idempotent."""
        await self._operate("pause")

    async def resume(self) -> None:
        """Lets it go on. Idempotent."""
        await self._operate("resume")

    async def set_timeout(
        self,
        ttl_running_stop: Seconds | None = None,
        *,
        deadline_s: Seconds | None = None,
    ) -> None:
        """Sets the idle limit and the absolute one, in seconds from now; ``None``
        leaves one as it is."""
        facts = {
            "ttl_running_stop": seconds(ttl_running_stop, "ttl_running_stop"),
            "deadline_s": seconds(deadline_s, "deadline_s"),
        }
        given = {k: v for k, v in facts.items() if v is not None}
        if not given:
            raise InvalidRequest("name a limit to set", field="ttl_running_stop")
        await self._operate("set_timeout", **given)

    async def _operate(self, verb: str, *, timeout_s: float = OPERATE_S, **facts: Any) -> None:
        results = await self._core.operate(
            verb, self.project, [self.uid], timeout_s=timeout_s, **facts
        )
        outcome = results.get(self.uid)
        if isinstance(outcome, DSecError):
            raise await self._judged(outcome)
        if outcome is not None:
            self.state = outcome
