"""The edge's door: exec and file verbs straight from clients, one hop on the bus.

Owns: who is let in, how many at once, that no command runs twice, typed errors, access
records. Does not own: frames (operation), what a verb does (verbs).

It takes its messages from the connection's reader, not through FastStream: this is the
hottest path of the system, a FastStream subscriber costs about 55 µs a message
(docs/adr/0002), and frames of one operation must be taken in order.

Exactly once: before a command runs, its operation id and the request's hash are kept
(execs), and its result follows. The same id again attaches to the running command, or
repeats the result; with other content it is a conflict. Where the edge ended in between,
the command that goes on in the sandbox is followed again; where nobody knows it any more
its outcome is unknown and said to be so: it never runs twice.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import Coroutine, Sequence
from typing import Any, cast

from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from schemas.audit import Access
from schemas.base import HEADER_FRAME, HEADER_OP, HEADER_TRACE, BadMessage, decode, encode
from schemas.exec import HEADER_AGAIN, HEADER_HAVE, HEADER_OFFSET, HEADER_SOURCE, ExecReply
from services.edge.door import calls, logverbs, outcomes
from services.edge.door.calls import Call
from services.edge.door.finished import Finished
from services.edge.door.operation import Operation
from services.edge.door.outcomes import death, did_not_begin, recorded, repeated
from services.edge.door.pacing import Pacing
from services.edge.door.ports import Room
from services.edge.door.signs import signs_of_life
from services.edge.door.verbs import VERBS, Verb
from services.edge.drivers.base import Resumable
from services.edge.drivers.offers import offered
from services.edge.journal import records
from services.edge.journal.execs import Done, Execs
from services.edge.journal.records import ExecRow
from services.edge.journal.trail import Trail
from services.edge.link import Link
from services.edge.reports.observer import Observer
from services.edge.sandbox.actor import Sandbox
from services.edge.supervisor import Supervisor
from shared import ids, quick, telemetry
from shared.bus import Bus
from shared.clock import Clock
from shared.errors import (
    Conflict,
    DsecError,
    Internal,
    InvalidRequest,
    NotFound,
    SandboxDied,
    Unavailable,
)
from shared.wire import bad_message, to_wire

log = logging.getLogger(__name__)

LEAVE_S = 2.0  # for what runs to say so, where the edge ends
SIGKILL = 9

Key = tuple[str, str]


class Door:
    """Operations in flight, by (uid, operation id)."""

    def __init__(
        self, supervisor: Supervisor, *, node: str, link: Link, execs: Execs,
        trail: Trail, observer: Observer, clock: Clock, ops_per_sandbox: int,
        ops_per_node: int, connections_per_sandbox: int,
    ) -> None:  # fmt: skip
        self._supervisor = supervisor
        self._node = node
        self._link = link
        self._execs = execs
        self._trail = trail
        self._verbs = {**VERBS, **logverbs.of(trail)}
        self._observer = observer
        self._clock = clock
        self._ops_per_sandbox = ops_per_sandbox
        self._ops_per_node = ops_per_node
        self._room = Room(connections_per_sandbox)
        self._running: dict[Key, Operation] = {}
        self._finished = Finished(clock)
        self._pacing = Pacing()
        self._sends = self._send  # one object for all operations
        self._tasks: set[asyncio.Task[None]] = set()
        self._ticker: asyncio.Task[None] | None = None
        self._closing = False
        self.counts: Counter[str] = Counter()
        """Operations since the start, by how they came and ended: see ``outcomes.COUNTED``."""

    async def open(self, bus: Bus) -> None:
        """Listens on a (new) connection."""
        await quick.subscribe(bus.client, f"dsec.exec.v1.*.{self._node}.>", self._message)
        if self._ticker is None:
            work = signs_of_life(self._running, self._finished, self._link, self._clock)
            self._ticker = asyncio.create_task(work, name="door")

    async def close(self) -> None:
        """Ends what runs, with an answer. Commands that can be resumed go on: their
        clients are told to ask again."""
        self._closing = True
        if self._ticker:
            self._ticker.cancel()
        self._supervisor.let_go()
        unknown = outcomes.unknown("the edge ended while this operation ran")
        again = outcomes.ending()
        for op in list(self._running.values()):
            op.leave() if op.stays else op.abort(again if op.repeats else unknown)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=LEAVE_S)

    def logging(self, uid: str) -> list[asyncio.Task[None]]:
        """The operations of a sandbox that run and get a record."""
        running = (op for (of, _), op in self._running.items() if of == uid and op.claimed)
        return [op.task for op in running if op.task is not None]

    # -- a message comes in -----------------------------------------------------------

    def _message(self, msg: Msg) -> None:
        self._pacing.came(len(self._running))
        call = calls.parse(msg.subject)
        if call is None or call.node != self._node:
            log.debug("not a call: %s", msg.subject)
        elif call.verb == "io":
            self._frame(call, msg)
        elif not calls.may_reply(call, msg.reply):
            log.warning("%s: a reply subject that is not the caller's", msg.subject)
        else:
            self._request(call, msg)

    def _frame(self, call: Call, msg: Msg) -> None:
        headers = msg.headers or {}
        key = (call.uid, headers.get(HEADER_OP, ""))
        frame = headers.get(HEADER_FRAME, "")
        op = self._running.get(key) or self._finished.get(key)
        mine = call.principal, call.project
        if op is None or (op.call.principal, op.call.project) != mine:
            return  # it is over, or somebody else's
        if frame in calls.USES:
            sandbox = self._supervisor.find(call.project, call.uid)
            if sandbox is not None:
                sandbox.nudge()
        try:
            op.received(frame, msg.data, calls.offset(headers.get(HEADER_OFFSET)))
        except InvalidRequest as exc:
            op.abort(exc)

    def _request(self, call: Call, msg: Msg) -> None:
        verb = self._verbs[call.verb]
        try:
            request = decode(msg.data, verb.request)
            self._admit(call, verb, request, msg)
        except BadMessage as exc:
            self._refuse(call, verb, msg, bad_message(exc))
        except DsecError as exc:
            self._refuse(call, verb, msg, exc)

    def _admit(self, call: Call, verb: Verb, request: Any, msg: Msg) -> None:
        if self._closing:
            raise outcomes.ending()
        sandbox = self._supervisor.find(call.project, call.uid)
        if sandbox is None:  # the same text whether it is another's or nobody's
            raise NotFound(f"no sandbox {call.uid} on {self._node}", field="uid")
        key = (call.uid, request.op_id)
        joins = getattr(request, "attach", False)
        hash_ = b"" if joins else calls.fingerprint(call, msg.data)
        known = self._running.get(key) or self._finished.get(key)
        if known is not None:
            if known.call.principal != call.principal:
                raise NotFound("no such operation of this principal", field="op_id")
            if hash_ and known.hash and known.hash != hash_:
                raise Conflict("this op_id was used for another request", field="op_id")
            self.counts["repeated"] += 1
            again = known.join(msg.reply, request.offset) if joins else known.attach(msg.reply)
            self._spawn(again)
            return
        headers = msg.headers or {}
        holder = calls.holder(call, headers)
        if not verb.aside and (refusal := sandbox.time.refusal(holder)) is not None:
            raise refusal
        busy = sandbox.activity.count - self._room.held(call.uid)
        if busy >= self._ops_per_sandbox:
            raise outcomes.full(f"{busy} operations run in this sandbox")
        if len(self._running) >= self._ops_per_node:
            raise outcomes.full(f"{len(self._running)} operations run on this node")
        op = verb.operation(
            call, request.op_id, hash_=hash_, reply_to=msg.reply, send=self._sends,
            clock=self._clock,
        )  # fmt: skip
        op.takes_input = getattr(request, "stdin", False)
        op.runs_by(sandbox.clock)
        op.stays = verb.resume is not None and offered(sandbox.driver, Resumable) is not None
        op.repeats = verb.repeats and not verb.once(request)
        op.repeated = HEADER_AGAIN in headers
        if have := headers.get(HEADER_HAVE):
            op.source = headers.get(HEADER_SOURCE)
            op.asked_again(calls.have(have))
        self._room.enter(call)
        self._running[key] = op
        if verb.wakes:  # looking at a sandbox is no activity
            sandbox.activity.enter(op, op.abort, holder=holder)
        trace = headers.get(HEADER_TRACE)
        op.task = self._spawn(self._perform(op, sandbox, verb, request, msg.data, trace))

    # -- an operation -----------------------------------------------------------------

    async def _perform(
        self, op: Operation, sandbox: Sandbox, verb: Verb, request: Any, body: bytes,
        trace: str | None,
    ) -> None:  # fmt: skip
        error: DsecError | None = None
        reply: Any = None
        try:
            op.enter()
            with telemetry.span(f"edge {op.call.verb}", parents=[trace]):
                reply = await self._once(op, sandbox, verb, request)
        except asyncio.CancelledError:
            error, reply = self._cut_short(op, verb)
        except SandboxDied as exc:
            error = death(exc, sandbox)
        except DsecError as exc:
            error = exc
        except Exception as exc:
            log.exception("%s in %s", op.call.verb, sandbox.uid)
            error = Internal(f"{type(exc).__name__} in {op.call.verb}")
        finally:
            if verb.wakes:
                sandbox.activity.leave(op)
        if error is not None:
            reply = verb.reply(op_id=op.op_id, error=to_wire(error))
        await self._finish(op, verb, reply, error, body)

    async def _once(self, op: Operation, sandbox: Sandbox, verb: Verb, request: Any) -> Any:
        verb.check(request)
        once = verb.once(request)
        if verb.wakes and sandbox.state != "running":
            await self._awake(op, sandbox, once=once)
        if once or verb.logs(request):
            row = await self._known(op, sandbox, request)
            if row is not None and once:
                op.begun = True
                return await repeated(row, op, sandbox, verb, request)
            op.claimed = True
        if verb.wakes:  # it may have been paused meanwhile
            await sandbox.ready()
        op.begun = True
        return await verb.run(sandbox, request, op)

    async def _known(self, op: Operation, sandbox: Sandbox, request: Any) -> ExecRow | None:
        """What was known of it already; else its intent is kept from here on."""
        uid, op_id, trail = sandbox.uid, op.op_id, self._trail
        if op.hash:
            try:
                row = await self._execs.begin(
                    uid, op_id, lambda: trail.claim(op, sandbox, request, self._clock.now()),
                    again=op.again or op.repeated,
                )  # fmt: skip
            except asyncio.CancelledError:
                op.claimed = op.logged.seq > 0  # the journal will keep it: with its end
                raise
            except Exception:
                trail.unclaimed(op, sandbox)
                raise
            if row is None:
                trail.begun(op)
                return None
            if row.hash != op.hash:
                raise Conflict("this op_id was used for another request", field="op_id")
        elif (row := await self._execs.find(uid, op_id)) is None:
            raise NotFound(f"no operation {op_id} in this sandbox", field="op_id")
        trail.again(op, row, request)
        op.hash = row.hash
        return row

    async def _awake(self, op: Operation, sandbox: Sandbox, *, once: bool) -> None:
        """Before an intent is noted: a resume may take long, or fail. To follow again
        what was begun needs none."""
        await sandbox.found()
        uid, op_id = sandbox.uid, op.op_id
        if not once or not await self._execs.find(uid, op_id):
            await sandbox.ready()

    def _cut_short(self, op: Operation, verb: Verb) -> tuple[DsecError | None, Any]:
        if op.aborted is not None:
            return op.aborted, None
        if op.left:
            return outcomes.ending(), None
        if verb.reply is not ExecReply:
            return Conflict("cancelled by the client", cause="cancelled"), None
        return None, ExecReply(
            op_id=op.op_id, exit_code=128 + SIGKILL, signal="KILL", seq=op.logged.seq,
            duration_s=self._clock.now() - op.begun_at,
            stdout=bytes(op.kept["stdout"]), stderr=bytes(op.kept["stderr"]),
        )  # fmt: skip

    async def _finish(
        self, op: Operation, verb: Verb, reply: Any, error: DsecError | None, body: bytes
    ) -> None:
        key = (op.call.uid, op.op_id)
        try:
            final = encode(reply)
        except UnicodeEncodeError:  # texts come from the sandbox
            error = error or Internal("the sandbox's answer holds text that is not UTF-8")
            reply = verb.reply(op_id=op.op_id, error=to_wire(Internal(error.message)))
            final = encode(reply)
        limit = self._link.payload_limit()
        if len(final) > limit:
            text = f"the answer of {len(final)} bytes is over the bus's limit of {limit}"
            error = InvalidRequest(text, field="payload")
            reply = verb.reply(op_id=op.op_id, error=to_wire(error))
            final = encode(reply)
        op.kept.clear()
        await self._trail.seal(op)
        outcomes.count(self.counts, op, error)
        now = self._clock.now()  # before its client knows, who may begin the next one
        await op.finish(final)  # the answer leaves before it is written down
        self._running.pop(key, None)
        op.orders.end()
        op.task = None
        self._room.leave(op.call)
        if op.begun and not did_not_begin(error):
            self._finished.put(key, op)
        self._pacing.came(len(self._running))
        changes, done = self._outcome(op, error, reply, final, now)
        self._record(op.call, body, error, changes, done)

    def _outcome(
        self, op: Operation, error: DsecError | None, reply: Any, final: bytes, now: float
    ) -> tuple[list[records.Change], Done]:
        """What the journal keeps of its end. One that is left, or was found again, goes on:
        whoever asks again follows it."""
        if not op.claimed or (did_not_begin(error) and (op.left or op.resumed)):
            return [], None
        kept = recorded(op, reply, final)
        self._trail.ended(op, kept, now)
        end = self._execs.dropped if did_not_begin(error) else self._execs.ended
        return end(op.call.uid, op.op_id, kept, now)

    def _refuse(self, call: Call, verb: Verb, msg: Msg, error: DsecError) -> None:
        op_id = msg.reply.rpartition(".")[2]
        final = encode(verb.reply(op_id=op_id, error=to_wire(error)))
        self._spawn(self._send(msg.reply, final, {HEADER_FRAME: "x"}))
        self._record(call, msg.data, error)

    def _record(
        self, call: Call, body: bytes, error: DsecError | None,
        changes: Sequence[records.Change] = (), done: Done = None,
    ) -> None:  # fmt: skip
        try:
            if call.verb == "info":
                return
            access = Access(
                id=ids.new(), at=self._clock.now(), project=call.project,
                principal=call.principal, verb=f"sandbox.{call.verb}", entity="sandbox",
                target=call.uid,
                outcome=error.code if error else "ok", node=self._node,
                sha256=hashlib.sha256(body).hexdigest(), bytes=len(body),
            )  # fmt: skip
            self._observer.accessed(access, *changes, done=done)
        except Unavailable as exc:
            log.error("%s of %s is not recorded: %s", call.verb, call.uid, exc.message)

    # -- means ------------------------------------------------------------------------

    async def _send(self, subject: str, data: bytes, headers: dict[str, str] | None) -> None:
        """A frame to a client, at once where no other operation has one to be written with
        it. One that is lost with the connection is sent again when the client attaches again."""
        alone = len(self._running) < 2
        try:
            await quick.send(self._link.bus.client, subject, data, headers, at_once=alone)
        except (Unavailable, NatsError) as exc:
            log.debug("a frame is lost: %r", exc)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(self._watched(work))
        self._tasks.add(task)
        return task

    async def _watched(self, work: Coroutine[Any, Any, None]) -> None:
        """Where a task's end calls back, the loop has one more turn for it, once a command."""
        try:
            await work
        except Exception:
            log.exception("the door")
        finally:
            self._tasks.discard(cast("asyncio.Task[None]", asyncio.current_task()))
