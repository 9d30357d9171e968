"""One sandbox as users hold it.

Owns: commands, its life, what is known of it. Does not own: creating and finding
(:mod:`libdsec.client`), files (:mod:`libdsec.files`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from libdsec import _ids
from libdsec._command import attach_request, command_request, shown
from libdsec._core import TERMINAL, Core, death
from libdsec._held import OPERATE_S
from libdsec._wire import (
    INLINE_BYTES,
    InfoReply,
    InfoRequest,
    SandboxInfo,
)  # fmt: skip
from libdsec.args import Seconds, seconds
from libdsec.errors import DeadlineExceeded, InvalidRequest, NotFound, SandboxDied
from libdsec.files import Files
from libdsec.interaction import BUFFER_BYTES, Interaction
from libdsec.policing import HasPolicy
from libdsec.ports import HasPorts
from libdsec.process import OnOutput, Process, Stdin, checked
from libdsec.replay import Replay, replay
from libdsec.results import ExecResult, Info, info_of
from libdsec.sessions import OUTPUT_LIMIT_BYTES, Session
from libdsec.snapshots import HasSnapshots
from libdsec.trajectory import Trajectory

if TYPE_CHECKING:
    from libdsec.forward import FastForward
    from libdsec.verifying import Verifying

UNLIMITED_BYTES = 1 << 40
READY_S = 120.0
READ_S, MAX_READ_S = 0.1, 2.0
"""Waits between reads of the state of a sandbox that is coming up."""
LEASE_S = 60.0
KEEP: Literal["keep"] = "keep"
STANDING = ("running", "pausing", "paused", "resuming")
"""States of a sandbox that lives on its node."""
TERMINAL_SIZE = (24, 80)
"""Rows and columns of a terminal that nobody looks at."""


class Sandbox(HasSnapshots, HasPorts, HasPolicy):
    """A sandbox. ``state`` is the last one seen; :meth:`info` asks. Any call on a
    paused sandbox resumes it. ``async with`` stops it at the end."""

    def __init__(self, core: Core, uid: str, **facts: Any) -> None:
        super().__init__(core, uid, **facts)
        self.files = Files(self)
        self._renewing = asyncio.Lock()

    @classmethod
    def _of(cls, core: Core, found: SandboxInfo) -> Sandbox:
        made = cls(
            core, found.uid, project=found.project, state=found.state, id=found.id,
            node=found.node, job=found.job, labels=found.labels,
        )  # fmt: skip
        made._time_up = found.time_up
        return made

    def __repr__(self) -> str:
        labels = f", labels={self.labels}" if self.labels else ""
        return f"Sandbox({self.id!r}, state={self.state!r}{labels})"

    @property
    def time_up(self) -> str | None:
        """The time limit that ended or paused it, as of ``state``."""
        return self._time_up

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
        functions persist between calls. Short for ``session(session).run(cmd)``:
        arguments as of :meth:`Session.run`."""
        return await self.session(session, user=user).run(
            cmd,
            timeout=timeout,
            check=check,
            on_output=on_output,
            output_limit_bytes=output_limit_bytes,
            op_id=op_id,
        )

    def session(
        self,
        name: str = "main",
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> Session:
        """The shell session ``name``, to run commands in and interrupt them. The first
        command starts its shell, with ``cwd``, ``env`` and ``user``; to ask for another
        user later is ``InvalidRequest``. Several at once are apart."""
        return Session(self, name, cwd=cwd, env=env, user=user)

    async def exec(
        self,
        *command: str | Sequence[str],
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        stdin: Stdin | None = None,
        timeout: Seconds | None = None,
        idle_timeout: Seconds | None = None,
        output_limit_bytes: int = OUTPUT_LIMIT_BYTES,
        merge: bool = False,
        check: bool = False,
        on_output: OnOutput | None = None,
        op_id: str | None = None,
    ) -> ExecResult:
        """Runs one command, by itself and beside others. One string is a shell
        command line, several (or one sequence) are an argv. ``stdin``: bytes, text, or an
        iterable of bytes, also an asynchronous one. ``timeout``: seconds until
        the whole tree is killed; ``idle_timeout``: the same after so long without
        output. ``output_limit_bytes`` bounds each stream: head and tail are kept.
        ``merge`` sends stderr into stdout. The same ``op_id`` never runs twice: a
        repeated call gets the first one's result."""
        data = stdin.encode() if isinstance(stdin, str) else stdin
        inline = isinstance(data, bytes) and len(data) <= INLINE_BYTES
        request = command_request(
            command,
            cwd=cwd,
            env=env,
            user=user,
            timeout=timeout,
            idle_timeout=idle_timeout,
            output_limit_bytes=output_limit_bytes,
            merge=merge,
            stdin_data=data if isinstance(data, bytes) and inline else None,
            stdin=data is not None and not inline,
            stream=on_output is not None or output_limit_bytes > INLINE_BYTES,
            late=on_output is None,
            op_id=op_id,
        )
        feed = None if inline else data
        result = await self._run(request, stdin=feed, on_output=on_output)
        return checked(result, shown(request)) if check else result

    async def spawn(
        self,
        *command: str | Sequence[str],
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        stdin: bool | None = None,
        timeout: Seconds | None = None,
        idle_timeout: Seconds | None = None,
        output_limit_bytes: int | None = None,
        merge: bool = False,
        session: str | None = None,
        pty: tuple[int, int] | None = None,
        op_id: str | None = None,
    ) -> Process:
        """Starts a command to talk to; arguments as of :meth:`exec`. ``stdin``: whether
        it gets an input; by default yes, in a session none can. Output is not limited
        unless ``output_limit_bytes`` says so.
        ``pty`` (rows, columns) puts it on a terminal: one output, keys such as Ctrl-C as
        bytes of input, :meth:`Process.resize`; ``close_stdin`` types end-of-file; when
        this client is gone for a minute, everything on the terminal is killed."""
        limit = UNLIMITED_BYTES if output_limit_bytes is None else output_limit_bytes
        talks = session is None if stdin is None else stdin
        request = command_request(
            command,
            session=session,
            cwd=cwd,
            env=env,
            user=user,
            timeout=timeout,
            idle_timeout=idle_timeout,
            output_limit_bytes=limit,
            merge=merge,
            stdin=talks,
            stream=True,
            pty=pty,
            op_id=op_id,
        )
        operation = await self._command(request)
        return Process(operation, command=shown(request), stdin=talks)

    async def interact(
        self,
        *command: str | Sequence[str],
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        timeout: Seconds | None = None,
        pty: tuple[int, int] | None = TERMINAL_SIZE,
        buffer_bytes: int = BUFFER_BYTES,
        op_id: str | None = None,
    ) -> Interaction:
        """Starts a program to talk to: send, expect, send. On a terminal, or with
        ``pty=None`` on pipes, stderr into stdout. ``buffer_bytes`` bounds what is kept of
        output that nothing matched."""
        process = await self.spawn(
            *command, cwd=cwd, env=env, user=user, timeout=timeout, pty=pty,
            merge=pty is None, op_id=op_id,
        )  # fmt: skip
        return process.interact(buffer_bytes=buffer_bytes)

    async def attach(self, op_id: str, *, offset: int = 0) -> Process:
        """A running or just finished command of the same key or user, by its operation
        id; its streams move here from wherever they went. Output comes from ``offset``
        (bytes of both streams) on, as far as it is retained: the last MiB at least, of
        terminals only what is new after the node's service restarted; what is missing
        is counted in ``truncated``. Raises ``NotFound`` from the process's methods."""
        request = attach_request(op_id, offset)
        operation = await self._command(request, joining=offset)
        return Process(operation, command=f"operation {op_id}", stdin=True)

    # -- what was done -----------------------------------------------------------

    def trajectory(self) -> Trajectory:
        """What was done in it, record by record, also when it is over or lost."""
        return Trajectory(self)

    def fast_forward(self, lane: str = "main") -> FastForward:
        """The same sandbox for a script that may have run before: calls through it return
        what is recorded at their place, then go on for real. Scripts of one sandbox take a
        ``lane`` each."""
        from libdsec.forward import FastForward, lane_of

        return FastForward(self, lane_of(lane))

    async def replay(self, *, into: Sandbox) -> Replay:
        """Does in ``into`` what was done here, in the recorded order, and tells what came
        out differently."""
        return await replay([record async for record in self.trajectory()], into)

    def verifying(self, *, lease_s: Seconds = LEASE_S) -> Verifying:
        """The same sandbox for who judges what was done in it: ``async with`` holds a
        lease of ``lease_s`` seconds, renewed for as long as the block (and this process)
        lives. No time limit ends the sandbox meanwhile, within the node's bound, and where
        one has ended the agent's work already (``scoring_grace_s``), calls through it go
        on. Waits for the lease of a verifier that died to run out; raises ``Conflict``
        where another one lives."""
        from libdsec.verifying import Verifying

        return Verifying(self, seconds(lease_s, "lease_s"))

    # -- its life ----------------------------------------------------------------

    async def _ready(self) -> None:
        await self.ready()

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
        if found.state not in STANDING:
            return info
        try:
            live = await self._live()
        except (NotFound, SandboxDied):  # it ended just now: the services may not know yet
            return info_of(await self._core.lookup(self.uid, self.project) or found)
        if live.state in STANDING:  # its node knows first
            self.state = live.state
        kept = info.time_up if self.state == found.state else None
        return replace(
            info, state=self.state, usage=dict(live.metrics), time_up=live.time_up or kept,
            enforcement=dict(live.enforcement),
        )  # fmt: skip

    async def metrics(self) -> dict[str, float]:
        """Live usage: ``cpu_s memory_bytes memory_peak_bytes pids disk_bytes oom_kills``; since
        its node's services began: commands (``execs``), bytes of its connections to the outside
        (``net_rx_bytes net_tx_bytes``) and what the node fetched of its layers
        (``image_fetched_bytes``). Without what its backend does not measure."""
        return dict((await self._live()).metrics)

    async def _live(self) -> InfoReply:
        reply: InfoReply = await self._answer(
            "info", InfoRequest(op_id=_ids.new()), InfoReply
        )
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
        await self._stand("pause")

    async def resume(self) -> None:
        """Lets it go on. Idempotent."""
        await self._stand("resume")

    async def set_timeout(
        self,
        ttl_running_stop: Seconds | Literal["keep"] | None = KEEP,
        *,
        deadline_s: Seconds | Literal["keep"] | None = KEEP,
    ) -> None:
        """Sets the idle limit and the absolute one, in seconds from now; ``None``: never;
        ``"keep"``, or left out: as it is. Of several calls the last one counts, whichever
        arrives first. Where time was up already it changes nothing."""
        asked = {"ttl_running_stop": ttl_running_stop, "deadline_s": deadline_s}
        given = {k: _limit(v, k) for k, v in asked.items() if v != KEEP}
        if not given:
            raise InvalidRequest("name a limit to set", field="ttl_running_stop")
        async with self._renewing:  # the next one is asked when the last was taken
            await self._operate("set_timeout", **given)


def _limit(value: Any, name: str) -> float:
    """As the wire has it: 0 is no limit."""
    limit = seconds(value, name)
    if limit is not None and limit <= 0:
        raise InvalidRequest(f"{name}: over 0 s; None means never", field=name)
    return limit or 0.0
