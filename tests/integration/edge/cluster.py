"""A real nats-server, a scheduler's end of the bus, edge processes and a raw client.

The edge connects as a user with exactly the permissions of a node, so that what it may
not do shows here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg

from devstack.credentials import load_or_make
from devstack.nats_server import NatsServer
from schemas.audit import Access, AccessRecords
from schemas.base import HEADER_FRAME, HEADER_OP, decode, encode
from schemas.exec import ExecReply, ExecRequest, FileReply, InfoReply
from schemas.node import Heartbeat, JoinReply, JoinRequest
from schemas.sandbox import (
    EdgeObservations,
    EdgeOp,
    EdgeOpItem,
    EdgeStart,
    Observation,
    ResolvedSpec,
    SandboxSpec,
    StartItem,
)
from schemas.streams import DURABLES, EDGE_DURABLE
from schemas.subjects import cmd, exec_, out
from schemas.trajectory import output_of
from shared import ids, topology
from shared.bus import Bus
from shared.consumer import BatchConsumer, Received
from shared.settings import Common

REPOSITORY = Path(__file__).parents[3]
NODE = "n1"
PROJECT = "team"
PRINCIPAL = "01hzzzzzzzzzzzzzzzzzzzzzzz"
NODE_USER, CLIENT_USER = "burst", "audit"
WAIT_S = 60.0

NODE_PERMISSIONS = {
    "publish": [
        f"dsec.hb.v1.{NODE}", f"dsec.evt.v1.edge.*.{NODE}", f"dsec.sec.v1.*.*.{NODE}",
        f"dsec.trj.v1.{NODE}", output_of(NODE),
        f"dsec.out.v1.{NODE}.>", f"dsec.rpc.v1.scheduler.join.{NODE}",
        f"$JS.API.CONSUMER.MSG.NEXT.DSEC_CMD.edge_{NODE}",
        f"$JS.API.CONSUMER.INFO.DSEC_CMD.edge_{NODE}", f"$JS.ACK.DSEC_CMD.edge_{NODE}.>",
    ],
    "subscribe": [f"dsec.exec.v1.*.{NODE}.>", f"_INBOX.{NODE}.>"],
}  # fmt: skip


async def until(condition: Callable[[], Any], *, within_s: float = WAIT_S) -> Any:
    """The condition's first true result."""
    end = time.monotonic() + within_s
    while True:
        result = condition()
        if result:
            return result
        assert time.monotonic() < end, "it did not happen in time"
        await asyncio.sleep(0.01)


@dataclass
class Scheduler:
    """The scheduler's end: declares, answers joins, sends commands, hears."""

    bus: Bus
    observations: list[Observation] = field(default_factory=list)
    access: list[Access] = field(default_factory=list)
    beats: list[Heartbeat] = field(default_factory=list)
    joins: list[JoinRequest] = field(default_factory=list)
    forget: list[str] = field(default_factory=list)

    async def open(self) -> None:
        client = self.bus.client
        await topology.declare(self.bus.js)
        await client.subscribe("dsec.rpc.v1.scheduler.join.*", cb=self._join)
        await client.subscribe("dsec.hb.v1.*", cb=self._beat)
        await client.flush()
        durables = {d.name: d for d in DURABLES}
        self._consumers = [
            BatchConsumer(self.bus, durables["scheduler_observations"], self._observed),
            BatchConsumer(self.bus, durables["audit_access"], self._accessed),
        ]
        for consumer in self._consumers:
            consumer.start()

    async def close(self) -> None:
        await asyncio.gather(*(consumer.close() for consumer in self._consumers))
        await self.bus.close()

    async def _join(self, msg: Msg) -> None:
        request = decode(msg.data, JoinRequest)
        self.joins.append(request)
        durable = await topology.declare_durable(self.bus.js, EDGE_DURABLE, request.node)
        reply = JoinReply(node=request.node, durable=durable, forget=self.forget)
        await msg.respond(encode(reply))

    async def _observed(self, batch: Sequence[Received]) -> None:
        for message in batch:
            self.observations += decode(message.data, EdgeObservations).observations

    async def _accessed(self, batch: Sequence[Received]) -> None:
        for message in batch:
            self.access += decode(message.data, AccessRecords).records

    async def _beat(self, msg: Msg) -> None:
        self.beats.append(decode(msg.data, Heartbeat))

    async def start(
        self, uids: Iterable[str], *, generation: int = 1, expires_s: float = 300.0,
        project: str = PROJECT, **spec: Any,
    ) -> None:  # fmt: skip
        """Places sandboxes on the node."""
        spec.setdefault("backend", "fake")
        items = [
            StartItem(
                uid=uid, project=project, generation=generation, spec=0,
                expires_at=time.time() + expires_s,
            )
            for uid in uids
        ]  # fmt: skip
        resolved = ResolvedSpec(spec=SandboxSpec(**spec))
        await self.send("start", EdgeStart(specs=[resolved], starts=items))

    async def op(self, verb: str, uid: str, *, generation: int = 2, **more: Any) -> None:
        """Sends one operation."""
        item = EdgeOpItem(uid=uid, project=PROJECT, generation=generation, **more)
        await self.send(verb, EdgeOp(items=[item]))

    async def send(self, verb: str, message: Any) -> None:
        await self.bus.js.publish(cmd("edge", verb, NODE), encode(message))

    def seen(self, uid: str) -> list[str]:
        """What was observed of a sandbox, without ``starting``."""
        of = [o.observed for o in self.observations if o.uid == uid]
        return [o for o in of if o != "starting"]

    def last(self, uid: str) -> Observation:
        return [o for o in self.observations if o.uid == uid][-1]

    async def observed(self, uid: str, what: str, *, within_s: float = WAIT_S) -> Observation:
        """Waits for an observation."""

        def found() -> Observation | None:
            hits = [o for o in self.observations if (o.uid, o.observed) == (uid, what)]
            return hits[-1] if hits else None

        result = await until(found, within_s=within_s)
        assert isinstance(result, Observation)
        return result


@dataclass
class Answer:
    """All frames of one operation so far."""

    subject: str
    frames: list[tuple[str, bytes, dict[str, str]]] = field(default_factory=list)
    final: asyncio.Future[bytes] = field(default_factory=lambda: asyncio.Future())

    def data(self, frame: str = "o") -> bytes:
        return b"".join(data for kind, data, _ in self.frames if kind == frame)

    def kinds(self) -> str:
        return "".join(kind for kind, _, _ in self.frames)


class Caller:
    """A client without the SDK: one connection, raw messages."""

    def __init__(self, client: Client, *, principal: str = PRINCIPAL) -> None:
        self.client = client
        self.principal = principal
        self.connection = ids.new()
        self.answers: dict[str, Answer] = {}

    async def open(self) -> None:
        subject = out("*", self.principal, self.connection, "*")
        await self.client.subscribe(subject, cb=self._answered)
        await self.client.flush()

    async def _answered(self, msg: Msg) -> None:
        answer = self.answers.get(msg.subject)
        if answer is None:
            return
        headers = dict(msg.headers or {})
        kind = headers.get(HEADER_FRAME, "x")
        answer.frames.append((kind, msg.data, headers))
        if kind == "x" and not answer.final.done():
            answer.final.set_result(msg.data)

    async def call(
        self, uid: str, verb: str, request: Any, *, project: str = PROJECT, body: bytes = b"",
        headers: dict[str, str] | None = None,
    ) -> Answer:  # fmt: skip
        """Sends a request; the answer fills as frames come."""
        reply = out(NODE, self.principal, self.connection, request.op_id)
        answer = self.answers[reply] = Answer(reply)
        subject = exec_(project, NODE, uid, verb, self.principal)
        await self.client.publish(subject, body or encode(request), reply=reply, headers=headers)
        return answer

    async def io(
        self, uid: str, op_id: str, frame: str, data: bytes = b"", *, project: str = PROJECT
    ) -> None:
        """Sends one frame of an operation."""
        headers = {HEADER_FRAME: frame, HEADER_OP: op_id}
        subject = exec_(project, NODE, uid, "io", self.principal)
        await self.client.publish(subject, data, headers=headers)

    async def exec(self, uid: str, request: Any, **more: Any) -> ExecReply:
        """Runs a command to its final reply."""
        answer = await self.call(uid, "exec", request, **more)
        return decode(await asyncio.wait_for(answer.final, WAIT_S), ExecReply)

    async def marked(self, uid: str) -> None:
        """Returns once a command has left its mark ``/ran``."""
        async with asyncio.timeout(WAIT_S):
            look = "cat /ran"
            while not (await self.exec(uid, ExecRequest(op_id=ids.new(), shell=look))).stdout:
                await asyncio.sleep(0.05)

    async def file(self, uid: str, verb: str, request: Any, **more: Any) -> FileReply:
        """A file verb to its final reply."""
        answer = await self.call(uid, f"file_{verb}", request, **more)
        return decode(await asyncio.wait_for(answer.final, WAIT_S), FileReply)

    async def info(self, uid: str, request: Any) -> InfoReply:
        """Live facts."""
        answer = await self.call(uid, "info", request)
        return decode(await asyncio.wait_for(answer.final, WAIT_S), InfoReply)


class EdgeProcess:
    """``python -m services.edge`` over one state folder."""

    def __init__(self, folder: Path, env: dict[str, str]) -> None:
        self.folder = folder
        self.env = env
        self.process: asyncio.subprocess.Process | None = None

    async def start(self, **more: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        env = {**os.environ, **self.env, **more, "DSEC_STATE_DIR": str(self.folder)}
        with (self.folder.parent / "edge.log").open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "services.edge", env=env, cwd=REPOSITORY, stderr=log
            )

    async def kill(self, number: signal.Signals = signal.SIGKILL) -> int:
        """Ends it; returns the exit code."""
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)
        return await asyncio.wait_for(self.process.wait(), WAIT_S)

    @property
    def sandboxes(self) -> set[str]:
        """Folders of fake sandboxes: what is really there."""
        root = self.folder / "drivers" / "fake"
        return {p.name for p in root.iterdir()} if root.exists() else set()


@dataclass
class Cluster:
    """All of it."""

    nats: NatsServer
    edge: EdgeProcess
    scheduler: Scheduler
    caller: Caller
    url: str
    password: str

    async def running(self, **spec: Any) -> str:
        """A running sandbox's uid."""
        uid = ids.new()
        await self.scheduler.start([uid], **spec)
        await self.scheduler.observed(uid, "running")
        return uid

    async def another_caller(self, principal: str = PRINCIPAL) -> Caller:
        """A second connection."""
        client = await nats.connect(self.url, user=CLIENT_USER, password=self.password)
        caller = Caller(client, principal=principal)
        await caller.open()
        return caller


@asynccontextmanager
async def cluster(folder: Path, **env: str) -> AsyncIterator[Cluster]:
    """A running system with one edge that has joined."""
    credentials = load_or_make(folder / "credentials.json")
    passwords = credentials.nats_passwords
    server = NatsServer(folder, credentials, {NODE_USER: NODE_PERMISSIONS})
    await server.start()
    url = server.url
    bus = Bus(
        Common(
            nats_url=url, nats_user="scheduler", nats_password=passwords["scheduler"]
        ),
        "test-scheduler",
    )  # fmt: skip
    await bus.start()
    scheduler = Scheduler(bus)
    await scheduler.open()
    edge = EdgeProcess(
        folder / "edge",
        {
            "DSEC_NATS_URL": url, "DSEC_NATS_USER": NODE_USER,
            "DSEC_NATS_PASSWORD": passwords[NODE_USER], "DSEC_NODE": NODE,
            "DSEC_DRIVERS": "fake", "DSEC_STORE_URL": f"file://{folder}/store",
            "DSEC_MEMORY_FLOOR_MB": "1", "DSEC_DISK_FLOOR_MB": "1", "DSEC_PIDS_FLOOR": "1",
            "DSEC_PRESSURE_CPU": "1.1", "DSEC_PRESSURE_MEMORY": "1.1", "DSEC_PRESSURE_IO": "1.1",
            "DSEC_STOP_TIMEOUT_S": "1", **env,
        },
    )  # fmt: skip
    client = await nats.connect(
        url, user=CLIENT_USER, password=passwords[CLIENT_USER], max_reconnect_attempts=-1,
        reconnect_time_wait=0.2,
    )  # fmt: skip
    caller = Caller(client)
    await caller.open()
    try:
        await edge.start()
        await until(lambda: scheduler.joins and scheduler.beats)
        yield Cluster(server, edge, scheduler, caller, url, passwords[CLIENT_USER])
    finally:
        closing: list[Awaitable[object]] = [scheduler.close()]
        if edge.process is not None and edge.process.returncode is None:
            closing.append(edge.kill(signal.SIGTERM))
        await asyncio.gather(*closing)
        await client.close()
        await server.child.stop()
