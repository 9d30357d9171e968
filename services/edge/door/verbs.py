"""What each verb at the door does with a sandbox.

Owns: translating requests to driver calls and outcomes to final replies. Does not
own: who may call, idempotency, frames, files (fileverbs).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Any

from schemas.control import (
    LeaseReply,
    LeaseRequest,
    PackReply,
    PackRequest,
    PolicyReply,
    PolicyRequest,
    StandingReply,
    StandingRequest,
)
from schemas.exec import (
    INLINE_BYTES,
    ConnectReply,
    ConnectRequest,
    ExecReply,
    ExecRequest,
    FileReply,
    FileRequest,
    InfoReply,
    InfoRequest,
)
from schemas.trajectory import NoteReply
from services.edge.door import fileverbs, standing
from services.edge.door.operation import Operation
from services.edge.door.ports import Connection, run_connect
from services.edge.drivers.base import (
    ExecOutcome,
    ExecSpec,
    Resize,
    Resumable,
)  # fmt: skip
from services.edge.drivers.offers import offered
from services.edge.reports.noted import noted
from services.edge.sandbox import repolicing, timeup
from services.edge.sandbox.actor import Sandbox
from services.edge.snapshots import snapshots
from shared.errors import InvalidRequest, SandboxDied, Unavailable
from shared.trajectory import Page

BACKSTOP_S = 10.0
"""How much later than inside the sandbox a command's limit is enforced here."""
USAGE_S = 2.0
LIVE = ("running", "pausing", "paused", "resuming")

Reply = (
    ExecReply | FileReply | InfoReply | ConnectReply | PolicyReply | StandingReply | PackReply
    | LeaseReply | Page | NoteReply
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Verb:
    """A verb: its request, its reply, what it does, whether a repetition of it would
    do harm (``once``: then its intent and result are journalled), whether it belongs to the
    trajectory (``logs``: then they are too), what is wrong with a
    request (``check`` raises), whether it needs a running sandbox (``wakes``), whether it
    is let in also while a verifier has the sandbox for itself (``aside``), how to go on
    with what an earlier edge process began (``resume``; ``None``: nobody knows it), whether
    its client may begin again where it was not journalled (``repeats``), the class of its
    ``operation``."""

    request: type[Any]
    reply: type[Any]
    run: Callable[[Sandbox, Any, Any], Awaitable[Reply]]
    once: Callable[[Any], bool] = lambda request: False
    logs: Callable[[Any], bool] = lambda request: False
    check: Callable[[Any], None] = lambda request: None
    wakes: bool = True
    aside: bool = False
    resume: Callable[[Sandbox, Any, Operation], Awaitable[Reply | None]] | None = None
    repeats: bool = True
    operation: type[Operation] = Operation


def check_exec(request: ExecRequest) -> None:
    """Raises ``InvalidRequest`` naming the field."""
    if request.attach:
        return
    if (request.argv is None) == (request.shell is None):
        raise InvalidRequest("exactly one of argv and shell", field="argv")
    if request.session is not None and request.shell is None:
        raise InvalidRequest("a session runs shell commands", field="session")
    if request.session is not None and (request.stdin or request.stdin_data is not None):
        raise InvalidRequest("a session's commands have no input", field="stdin")
    if request.pty is not None and (request.session is not None or not request.stream):
        raise InvalidRequest("a terminal is streamed, and no session has one", field="pty")
    if request.stdin and request.stdin_data is not None:
        raise InvalidRequest("either input frames or stdin_data", field="stdin_data")
    if any("\0" in arg for arg in request.argv or ()) or "\0" in (request.shell or ""):
        raise InvalidRequest("a zero byte in the command", field="argv")
    for name, value in request.env.items():
        if "\0" in value:
            raise InvalidRequest("a value of the environment holds no NUL", field=f"env.{name}")


async def run_exec(sandbox: Sandbox, request: ExecRequest, op: Operation) -> ExecReply:
    """Runs a command; see :class:`schemas.exec.ExecRequest`."""
    handle = sandbox.present()
    sandbox.activity.execs += 1
    sandbox.activity.noted.extend(noted(request.argv, request.shell))
    op.streaming, op.terminal = request.stream, request.pty is not None
    op.late = request.stream and request.late
    if request.stdin_data is not None:
        op.preset(request.stdin_data)
    elif request.stdin:
        await op.want_input()
    spec = _exec_spec(request)
    if request.timeout_s is None or request.session is not None:
        # a session's time begins with its turn, which only the agent knows
        outcome = await sandbox.driver.exec(handle, spec, op)
        return _exec_reply(sandbox, op, outcome)
    try:
        async with sandbox.clock.timeout(request.timeout_s + BACKSTOP_S):
            outcome = await sandbox.driver.exec(handle, spec, op)
    except TimeoutError:
        outcome = ExecOutcome(None, signal="KILL", timed_out=True)
    return _exec_reply(sandbox, op, outcome)


def _exec_reply(sandbox: Sandbox, op: Operation, outcome: ExecOutcome) -> ExecReply:
    sandbox.activity.dropped_bytes += sum(outcome.truncated)
    return ExecReply(
        op_id=op.op_id, exit_code=outcome.exit_code, signal=outcome.signal,
        timed_out=outcome.timed_out, oom_killed=outcome.oom_killed,
        truncated=outcome.truncated, duration_s=outcome.duration_s, seq=op.logged.seq,
        epoch=sandbox.epoch, session_fresh=outcome.session_fresh,
        session_ended=outcome.session_ended,
        stdout=bytes(op.kept["stdout"]), stderr=bytes(op.kept["stderr"]),
    )  # fmt: skip


async def resume_exec(sandbox: Sandbox, request: ExecRequest, op: Operation) -> ExecReply | None:
    """Follows a command of an earlier edge process; ``None`` where nobody knows it. Who
    attaches by its id alone gets it as a stream, with input."""
    driver = offered(sandbox.driver, Resumable)
    if driver is None:
        return None
    handle = sandbox.present()
    op.streaming = request.stream or request.attach
    op.resumed = op.claimed = True
    op.takes_input = request.attach or request.stdin or request.stdin_data is not None
    if request.stdin_data is not None:
        op.preset(request.stdin_data)
    outcome = await driver.resume_exec(handle, op.op_id, op, stdin=op.takes_input)
    return None if outcome is None else _exec_reply(sandbox, op, outcome)


def _exec_spec(request: ExecRequest) -> ExecSpec:
    limit = request.output_limit_bytes
    if not request.stream:  # the driver keeps head and tail of what fits the reply
        limit = min(limit, INLINE_BYTES)
    return ExecSpec(
        op_id=request.op_id, argv=request.argv, shell=request.shell, session=request.session,
        cwd=request.cwd, env=request.env, user=request.user, timeout_s=request.timeout_s,
        idle_timeout_s=request.idle_timeout_s,
        output_limit_bytes=limit, merge=request.merge,
        stdin=request.stdin or request.stdin_data is not None,
        pty=Resize(*request.pty) if request.pty else None,
    )  # fmt: skip


async def run_info(sandbox: Sandbox, request: InfoRequest, op: Operation) -> InfoReply:
    """Live facts; an agent that does not answer leaves out the metrics."""
    metrics: dict[str, float] = {}
    if sandbox.state == "recovering":
        with contextlib.suppress(Unavailable, SandboxDied):
            await sandbox.found()
    handle = sandbox.handle
    if handle is not None and sandbox.state in LIVE:
        try:
            async with asyncio.timeout(USAGE_S):
                usage = await sandbox.driver.usage(handle)
        except (TimeoutError, SandboxDied):
            pass
        else:
            known = {**asdict(usage), "image_fetched_bytes": await sandbox.fetched_bytes()}
            metrics = {name: value for name, value in known.items() if value is not None}
        metrics["execs"] = sandbox.activity.execs
    return InfoReply(
        op_id=request.op_id, uid=sandbox.uid, state=sandbox.state, epoch=sandbox.epoch,
        metrics=metrics, enforcement=dict(handle.enforcement) if handle else {},
        idle_s=sandbox.activity.idle_s,
        time_up=sandbox.time.up or sandbox.pauses.cause,
    )  # fmt: skip


def always(request: Any) -> bool:
    """Whatever is asked for."""
    return True


def _placed(request: Any) -> bool:
    """What only looks belongs to the trajectory where a script counts it."""
    return request.lane is not None


VERBS: dict[str, Verb] = {
    "exec": Verb(
        ExecRequest, ExecReply, run_exec, always, always, check_exec, resume=resume_exec
    ),
    "info": Verb(InfoRequest, InfoReply, run_info, wakes=False, aside=True),
    "policy": Verb(
        PolicyRequest, PolicyReply, repolicing.run_policy, check=repolicing.check, wakes=False
    ),
    "pause": Verb(StandingRequest, StandingReply, standing.run_pause, wakes=False, aside=True),
    "resume": Verb(StandingRequest, StandingReply, standing.run_resume, wakes=False, aside=True),
    "connect": Verb(ConnectRequest, ConnectReply, run_connect, repeats=False, operation=Connection),
    "pack": Verb(PackRequest, PackReply, snapshots.run_pack, wakes=False, aside=True),
    "verify": Verb(LeaseRequest, LeaseReply, timeup.run_verify, wakes=False, aside=True),
    "file_read": Verb(FileRequest, FileReply, fileverbs.read, logs=_placed),
    "file_write": Verb(
        FileRequest, FileReply, fileverbs.write, lambda r: bool(r.append), always,
        resume=fileverbs.resume_input,
    ),
    "file_stat": Verb(FileRequest, FileReply, fileverbs.stat, logs=_placed),
    "file_list": Verb(FileRequest, FileReply, fileverbs.list_, logs=_placed),
    "file_mkdir": Verb(FileRequest, FileReply, fileverbs.mkdir, always, always),
    "file_remove": Verb(FileRequest, FileReply, fileverbs.remove, always, always),
    "file_move": Verb(
        FileRequest, FileReply, fileverbs.move, always, always, fileverbs.check_move
    ),
    "file_pack": Verb(
        FileRequest, FileReply, fileverbs.pack, logs=_placed, check=fileverbs.check_pack
    ),
    "file_unpack": Verb(
        FileRequest, FileReply, fileverbs.unpack, logs=always, resume=fileverbs.resume_input
    ),
    "file_watch": Verb(FileRequest, FileReply, fileverbs.watch),
}  # fmt: skip
