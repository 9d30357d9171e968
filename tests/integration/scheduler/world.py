"""What surrounds a scheduler in its tests: edges, auth and clients, on a real bus."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Any

import nats
from msgspec.structs import replace
from nats.aio.client import Client
from nats.aio.msg import Msg

from devstack import Endpoints
from schemas.base import WireError, decode, encode
from schemas.node import BackendStatus, FeatureReport, Heartbeat, JoinReply, JoinRequest, Resources
from schemas.sandbox import (
    CreateCommand,
    CreateItem,
    CreateReply,
    EdgeObservations,
    EdgeOp,
    EdgeOpItem,
    EdgeStart,
    ItemResult,
    Observation,
    OpCommand,
    OpReply,
    SandboxCreate,
    SandboxEvent,
    SandboxOp,
    SandboxOpRequest,
    SandboxSpec,
    StartItem,
)
from schemas.streams import EDGE_DURABLE
from schemas.subjects import cmd, evt_edge, hb, join
from shared import ids

BEAT_S = 0.2
FAKE = BackendStatus(
    supported=True,
    features={n: FeatureReport(supported=True) for n in ("exec", "files", "pause")},
)


async def eventually(
    check: Callable[[], Awaitable[Any] | Any], *, within_s: float = 60.0, what: str = ""
) -> Any:
    """Waits until ``check`` is true; returns what it returned."""
    end = time.monotonic() + within_s
    while True:
        value = check()
        if asyncio.iscoroutine(value):
            value = await value
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"not within {within_s} s: {what or check}")
        await asyncio.sleep(0.02)


async def connect(ends: Endpoints) -> Client:
    return await nats.connect(
        ends.nats_url,
        connect_timeout=60,
        user="scheduler",
        password=ends.nats_users["scheduler"],
        max_reconnect_attempts=-1,
        reconnect_time_wait=0.2,
        error_cb=_quiet,
    )


async def _quiet(_: Exception) -> None:
    return


class SimEdge:
    """An edge on the bus. ``on_start`` and ``on_op`` say what it observes: the
    name(s) of observations, or nothing. It refuses what is over ``room``."""

    def __init__(self, ends: Endpoints, node: str, room: int = 1000, **beat: Any) -> None:
        self.ends = ends
        self.node = node
        self.room = room
        self.epoch = ids.new()
        self.beat = beat
        self.backends = {"fake": FAKE}
        self.live: dict[str, str] = {}
        self.started: list[StartItem] = []
        self.ops: list[tuple[str, EdgeOpItem]] = []
        self.refused_for_room = 0
        self.beating = True
        self.taking = True
        self.ended = False
        self.on_start: Callable[[StartItem], list[str]] = lambda _: ["starting", "running"]
        self.on_op: Callable[[str, EdgeOpItem], list[str]] = self._obey
        self._tasks: list[asyncio.Task[None]] = []
        self._seq = 0
        self.nc: Client

    @property
    def capacity(self) -> Resources:
        return Resources(cores=1000.0, memory_mb=1_000_000, sandboxes=self.room)

    async def start(self, live: list[str] | None = None) -> JoinReply:
        self.nc = await connect(self.ends)
        request = JoinRequest(
            node=self.node,
            epoch=self.epoch,
            backends=self.backends,
            capacity=self.capacity,
            live=sorted(self.live) if live is None else live,
        )
        answer = await self.nc.request(join(self.node), encode(request), timeout=60)
        reply = decode(answer.data, JoinReply)
        self._tasks = [asyncio.create_task(self._beat()), asyncio.create_task(self._take())]
        return reply

    async def stop(self) -> None:
        self.ended = True  # a cancel may be lost in a wait that ends in the same moment
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.nc.close()

    async def _beat(self) -> None:
        while not self.ended:
            if self.beating:
                self._seq += 1
                beat = Heartbeat(
                    node=self.node,
                    epoch=self.epoch,
                    seq=self._seq,
                    at=time.time(),
                    capacity=self.capacity,
                    committed=Resources(sandboxes=len(self.live)),
                    used=Resources(),
                    backends=self.backends,
                    **self.beat,
                )
                await self.nc.publish(hb(self.node), encode(beat))
            await asyncio.sleep(BEAT_S)

    async def _take(self) -> None:
        while not self.ended:
            with contextlib.suppress(Exception):
                js = self.nc.jetstream()
                durable = EDGE_DURABLE.name.format(node=self.node)
                sub = await js.pull_subscribe_bind(durable=durable, stream=EDGE_DURABLE.stream)
                await self._take_from(sub)
            await asyncio.sleep(0.2)

    async def _take_from(self, sub: Any) -> None:
        while not self.ended:
            if not self.taking:
                await asyncio.sleep(0.05)
                continue
            try:
                messages = await sub.fetch(64, timeout=0.5)
            except TimeoutError:
                await sub.consumer_info()
                continue
            seen: list[Observation] = []
            for message in messages:
                seen += self.handle(message)
            await self.observe(seen)
            for message in messages:
                await message.ack()

    def handle(self, message: Msg) -> list[Observation]:
        verb = message.subject.split(".")[4]
        out: list[Observation] = []
        if verb == "start":
            for item in decode(message.data, EdgeStart).starts:
                out += self._start(item)
            return out
        for op in decode(message.data, EdgeOp).items:
            self.ops.append((verb, op))
            out += [saw(op.uid, op.generation, o, cause=op.cause) for o in self.on_op(verb, op)]
        return out

    def _start(self, item: StartItem) -> list[Observation]:
        self.started.append(item)
        if item.uid not in self.live and len(self.live) >= self.room:
            self.refused_for_room += 1
            return [saw(item.uid, item.generation, "refused", message="no room")]
        found = self.on_start(item)
        if "running" in found:
            self.live[item.uid] = "running"
        return [saw(item.uid, item.generation, o) for o in found]

    def _obey(self, verb: str, op: EdgeOpItem) -> list[str]:
        if verb == "stop":
            return ["stopped"] if self.live.pop(op.uid, None) else ["unknown"]
        if verb in ("set_timeout", "tighten"):
            return []
        if op.uid not in self.live:
            return ["unknown"]
        self.live[op.uid] = "paused" if verb == "pause" else "running"
        return ["paused" if verb == "pause" else "resumed"]

    async def observe(self, seen: list[Observation], msg_id: str | None = None) -> None:
        if not seen:
            return
        body = EdgeObservations(node=self.node, epoch=self.epoch, observations=seen)
        headers = {"Nats-Msg-Id": msg_id} if msg_id else None
        subject = evt_edge("sandbox", self.node)
        await self.nc.jetstream().publish(subject, encode(body), headers=headers)


def saw(uid: str, generation: int, observed: str, **kw: Any) -> Observation:
    return Observation(uid=uid, generation=generation, observed=observed, at=time.time(), **kw)


class Trainer:
    """auth and a client in one: publishes admitted commands, collects answers and
    events."""

    def __init__(self, ends: Endpoints, project: str = "lab", *, hears: bool = True) -> None:
        self.ends = ends
        self.project = project
        self.hears = hears
        """Whether it listens to events."""
        self.results: dict[str, ItemResult] = {}
        self.answers = 0
        self.op_replies: dict[str, OpReply] = {}
        self._op_parts: dict[str, list[ItemResult]] = {}
        self.events: list[SandboxEvent] = []
        self._heard: set[str] = set()
        self.nc: Client

    async def start(self) -> None:
        self.nc = await connect(self.ends)
        self.inbox = self.nc.new_inbox()
        await self.nc.subscribe(f"{self.inbox}.create", cb=self._created)
        await self.nc.subscribe(f"{self.inbox}.op", cb=self._operated)
        await self.nc.flush()
        if self.hears:
            await self.nc.subscribe(f"dsec.evt.v1.sandbox.{self.project}.>", cb=self._event)
        await self.nc.flush()

    async def stop(self) -> None:
        await self.nc.close()

    async def _created(self, message: Msg) -> None:
        for result in decode(message.data, CreateReply).results:
            self.answers += 1
            self.results[result.uid] = result

    async def _operated(self, message: Msg) -> None:
        reply = decode(message.data, OpReply)
        parts = self._op_parts.setdefault(reply.request_id, [])
        parts += reply.results
        if reply.last:
            self.op_replies[reply.request_id] = replace(reply, results=parts)

    async def _event(self, message: Msg) -> None:
        # what was sent again because its acknowledgement came late is in the stream once
        id_ = (message.headers or {}).get("Nats-Msg-Id", "")
        if not id_ or id_ not in self._heard:
            self._heard.add(id_)
            self.events.append(decode(message.data, SandboxEvent))

    def command(
        self, count: int = 1, *, request_id: str | None = None, expires_s: float = 60.0,
        refused: WireError | None = None, **spec: Any,
    ) -> CreateCommand:  # fmt: skip
        request_id = request_id or ids.new()
        return CreateCommand(
            project=self.project,
            principal="p",
            request_id=request_id,
            total=count,
            specs=[SandboxSpec(**{"backend": "fake", **spec})],
            items=[
                CreateItem(
                    uid=ids.item_uid(request_id, i), index=i, spec=-1 if refused else 0,
                    refused=refused,
                )
                for i in range(count)
            ],
            expires_at=time.time() + expires_s,
            reply_to=f"{self.inbox}.create",
        )  # fmt: skip

    async def send(self, *commands: CreateCommand) -> list[str]:
        body = encode(SandboxCreate(commands=list(commands)))
        await self.nc.jetstream(timeout=60).publish(cmd("sandbox", "create", "k"), body)
        return [i.uid for c in commands for i in c.items]

    async def create(self, count: int = 1, **kw: Any) -> list[str]:
        return await self.send(self.command(count, **kw))

    async def settled(self, uids: list[str], within_s: float = 60.0) -> list[ItemResult]:
        await eventually(
            lambda: all(u in self.results for u in uids), within_s=within_s, what="replies"
        )
        return [self.results[u] for u in uids]

    async def op(self, verb: str, uids: list[str], **kw: Any) -> str:
        request_id = kw.pop("request_id", None) or ids.new()
        command = OpCommand(
            project=self.project,
            asked_at=kw.pop("asked_at", 0.0),
            principal="p",
            verb=verb,  # type: ignore[arg-type]
            request=SandboxOpRequest(request_id=request_id, uids=uids, **kw),
            reply_to=f"{self.inbox}.op",
        )
        body = encode(SandboxOp(commands=[command]))
        await self.nc.jetstream(timeout=60).publish(cmd("sandbox", "op", "k"), body)
        return request_id

    async def operate(self, verb: str, uids: list[str], **kw: Any) -> dict[str, ItemResult]:
        request_id = await self.op(verb, uids, **kw)
        reply = await eventually(
            lambda: self.op_replies.get(request_id), what=f"{verb} reply"
        )
        return {r.uid: r for r in reply.results}

    def states_told(self, uid: str) -> list[str]:
        return [e.state for e in self.events if e.uid == uid]
