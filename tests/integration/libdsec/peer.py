"""The other side of the SDK, small: auth (with the bus's real auth callout), a
scheduler's state and an edge's door that runs real local processes.

It speaks the schemas over a real nats-server. Faults are switches on it.
"""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg

from devstack.credentials import load_or_make
from devstack.nats_server import NatsServer
from schemas.base import HEADER_REPLY, ErrorReply, WireError, decode, encode
from schemas.sandbox import (
    CreateReply,
    CreateRequest,
    ItemResult,
    OpReply,
    SandboxInfo,
    SandboxOpRequest,
    SandboxPage,
    SandboxQuery,
    SandboxSpec,
)
from services.auth.natsjwt import REQUEST_SUBJECT, Signer, read_request
from services.auth.permissions import Permissions
from shared import ids
from tests.integration.libdsec.door import Door

PRINCIPAL = "01k0000000000000000000peer"
KEY = f"dsec_{PRINCIPAL}_{'s' * 40}"
PROJECT = "acme"
NODE = "n1"
TERMINAL = {"stopped", "failed", "rejected", "lost"}


class Peer:
    """A server and its services. ``rows`` is the state of all sandboxes."""

    def __init__(self, folder: Path) -> None:
        self._credentials = load_or_make(folder / "credentials.json")
        self.server = NatsServer(folder, self._credentials)
        self.rows: dict[str, SandboxInfo] = {}
        self.specs_of: dict[str, bytes] = {}
        self.verbs: list[str] = []
        self.start_delay_s = 0.0
        self.lose_replies = False
        self.refused_keys: set[str] = set()
        self.forbidden: set[str] = set()
        self.door = Door(NODE, self._alive)
        self._client = Client()
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def url(self) -> str:
        return self.server.url

    def options(self, **more: Any) -> dict[str, Any]:
        """Arguments of a client of this peer."""
        return {"url": self.url, "api_key": KEY, "project": PROJECT, **more}

    def live(self) -> list[str]:
        return [uid for uid, row in self.rows.items() if row.state not in TERMINAL]

    async def start(self) -> None:
        await self.server.start()
        self._client = await nats.connect(
            self.url,
            user="auth",
            password=self._credentials.nats_passwords["auth"],
            max_reconnect_attempts=-1,
            reconnect_time_wait=0.1,
        )
        stream = self._client.jetstream(timeout=60)
        await stream.add_stream(name="DSEC_REQ", subjects=["dsec.req.v1.>"])
        await self._client.subscribe(REQUEST_SUBJECT, cb=self._callout)
        await self._client.subscribe("dsec.req.v1.>", cb=self._spawned(self._request))
        await self._client.subscribe("dsec.get.v1.>", cb=self._spawned(self._get))
        await self.door.open(self._client)
        await self._client.flush()

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await self.door.close()
        await self._client.close()
        await self.server.child.stop()

    async def kick(self) -> None:
        """The server dies and comes back on its port."""
        await self.server.child.kill()
        await self.server.start()

    def _spawned(self, handler: Any) -> Any:
        async def run(message: Msg) -> None:
            task = asyncio.create_task(handler(message))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        return run

    def _alive(self, uid: str) -> bool:
        row = self.rows.get(uid)
        return row is not None and row.state == "running"

    # -- auth --------------------------------------------------------------------

    async def _callout(self, message: Msg) -> None:
        request, now = read_request(message.data), time.time()
        signer = Signer(self._credentials.account_seed, account="DSEC")
        user = None
        if request.token == KEY and KEY not in self.refused_keys:
            kinds = [k for k in ("req", "get", "exec") if k not in self.forbidden]
            permissions = Permissions(
                publish=[f"dsec.{k}.v1.{PROJECT}.>" for k in kinds],
                subscribe=[
                    f"_INBOX.{PRINCIPAL}.>",
                    f"dsec.out.v1.*.{PRINCIPAL}.>",
                    f"dsec.evt.v1.sandbox.{PROJECT}.>",
                ],
            )
            user = signer.user(
                request, permissions, name=PRINCIPAL, now=now, expires_at=now + 3600
            )
        await message.respond(signer.answer(request, now=now, user=user))

    async def _request(self, message: Msg) -> None:
        entity, verb = message.subject.split(".")[4:6]
        if entity != "sandbox":
            return
        self.verbs.append(verb)
        reply_to = (message.headers or {})[HEADER_REPLY]
        if verb == "create":
            await self._create(message.data, reply_to)
        else:
            await self._operate(verb, message.data, reply_to)

    async def _reply(self, reply_to: str, message: Any) -> None:
        if not self.lose_replies:
            await self._client.publish(reply_to, encode(message))

    # -- scheduler ---------------------------------------------------------------

    async def _create(self, body: bytes, reply_to: str) -> None:
        request = decode(body, CreateRequest)
        total = len(request.specs) * request.count
        known = self.specs_of.setdefault(request.request_id, body)
        if json.loads(known)["specs"] != json.loads(body)["specs"]:
            error = WireError(code="conflict", message="other content", field="request_id")
            await self._reply(reply_to, ErrorReply(error=error))
            return
        for index in range(total):
            uid = ids.item_uid(request.request_id, index)
            spec = bytes(request.specs[index % len(request.specs)])
            if uid not in self.rows:
                self._insert(request.request_id, index, uid, spec)
        if self.start_delay_s:
            await asyncio.sleep(self.start_delay_s)
        results = []
        for index in range(total):
            uid = ids.item_uid(request.request_id, index)
            if self.rows[uid].state == "requested":
                self._set(uid, state="running", id=f"{NODE}-{uid}", node=NODE)
            results.append(self._result(uid))
        reply = CreateReply(request_id=request.request_id, total=total, results=results)
        await self._reply(reply_to, reply)

    def _insert(self, request_id: str, index: int, uid: str, spec_json: bytes) -> None:
        spec = decode(spec_json, SandboxSpec)
        now = time.time()
        row = SandboxInfo(
            uid=uid, project=PROJECT, state="requested", generation=1, backend=spec.backend,
            created_at=now, changed_at=now, request_id=request_id, index=index,
            labels=spec.labels, job=spec.job, spec=spec,
        )  # fmt: skip
        self.rows[uid] = row
        if spec.container_image == "missing:1":
            error = WireError(code="not_found", message="no image", field="container_image")
            self._set(uid, state="rejected", error=error)

    def _set(self, uid: str, **changes: Any) -> None:
        values = {n: getattr(self.rows[uid], n) for n in SandboxInfo.__struct_fields__}
        self.rows[uid] = SandboxInfo(**(values | changes))

    def lose(self, uid: str, cause: str = "node_lost") -> None:
        """A sandbox is lost by infrastructure's fault."""
        self._set(uid, state="lost", cause=cause, is_infra=True)

    def _result(self, uid: str) -> ItemResult:
        row = self.rows[uid]
        return ItemResult(
            index=row.index, uid=uid, state=row.state, id=row.id, node=row.node, error=row.error
        )

    async def _operate(self, verb: str, body: bytes, reply_to: str) -> None:
        request = decode(body, SandboxOpRequest)
        state = {"stop": "stopped", "pause": "paused"}.get(verb, "running")
        results = []
        for uid in request.uids:
            if uid not in self.rows:
                error = WireError(code="not_found", message=f"no sandbox {uid}", field="uids")
                results.append(ItemResult(index=0, uid=uid, state="failed", error=error))
                continue
            if self.rows[uid].state not in TERMINAL:
                self._set(uid, state=state, cause=request.cause)
            results.append(self._result(uid))
        await self._reply(reply_to, OpReply(request_id=request.request_id, results=results))

    async def _get(self, message: Msg) -> None:
        query = decode(message.data, SandboxQuery)
        rows = sorted(self.rows.values(), key=lambda r: r.uid)
        found = [r for r in rows if _matches(r, query)]
        if query.after is not None:
            found = [r for r in found if r.uid > query.after]
        page, rest = found[: query.limit], found[query.limit :]
        reply = SandboxPage(sandboxes=page, next=page[-1].uid if rest else None)
        await message.respond(encode(reply))


def _matches(row: SandboxInfo, query: SandboxQuery) -> bool:
    return (
        (not query.uids or row.uid in query.uids)
        and query.request_id in (None, row.request_id)
        and query.job in (None, row.job)
        and (not query.states or row.state in query.states)
        and all(row.labels.get(k) == v for k, v in query.labels.items())
    )
