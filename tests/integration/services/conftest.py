"""audit as it runs, with a scheduler that knows a few sandboxes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from nats.aio.msg import Msg

from devstack.process import free_port
from devstack.supervised import health
from schemas.base import decode, encode
from schemas.sandbox import SandboxInfo, SandboxPage, SandboxQuery
from schemas.subjects import rpc
from services.audit import app
from services.audit.settings import Settings
from shared import ids
from shared.bus import Bus
from shared.topology import declare
from tests.integration.conftest import Stack

SETTLE_S = 60.0
RESPONSES = """
[[response]]
rule = "extent_swap_ioctl"
do = "kill"

[[response]]
rule = "grader_overwritten"
do = "freeze"

[[response]]
rule = "forged_request"
do = "tighten"
"""


class Patient(Bus):
    """Waits for an answer as long as a busy machine may take."""

    async def request(
        self, subject: str, message: Any, type_: Any, *, timeout_s: float = SETTLE_S
    ) -> Any:
        return await super().request(subject, message, type_, timeout_s=timeout_s)


class Sandboxes:
    """What the scheduler knows; ``asked`` counts its questions. ``there`` can be unset."""

    def __init__(self) -> None:
        self.known: dict[str, SandboxInfo] = {}
        self.asked = 0
        self.there = asyncio.Event()
        self.there.set()

    def add(self, node: str = "n1", *, project: str = "p1", job: str | None = "j1") -> str:
        """A running sandbox; returns its uid."""
        uid = ids.new()
        self.known[uid] = SandboxInfo(
            uid=uid, project=project, state="running", generation=1, backend="container",
            created_at=1.0, changed_at=1.0, node=node, principal="k1", job=job,
            labels={"task": "t1"},
        )  # fmt: skip
        return uid

    async def answer(self, message: Msg) -> None:
        self.asked += 1
        if not self.there.is_set():
            return
        found = [self.known[u] for u in decode(message.data, SandboxQuery).uids if u in self.known]
        await message.respond(encode(SandboxPage(sandboxes=found)))


@pytest.fixture
async def bus(stack: Stack) -> AsyncIterator[Bus]:
    made = Patient(stack.settings(), "test")
    await made.start()
    await declare(made.js)
    yield made
    await made.close()


@pytest.fixture
async def sandboxes(bus: Bus) -> Sandboxes:
    made = Sandboxes()
    await bus.client.subscribe(rpc("scheduler", "sandboxes"), cb=made.answer)
    await bus.client.flush()
    return made


@pytest.fixture
async def audit(
    stack: Stack, bus: Bus, dsn_of: Callable[[str], str], tmp_path: Path
) -> AsyncIterator[Settings]:
    common = stack.settings("audit")
    responses = tmp_path / "responses.toml"
    responses.write_text(RESPONSES)
    settings = Settings(
        nats_url=common.nats_url, nats_user="audit", nats_password=common.nats_password,
        pg_dsn=dsn_of("audit"), health_port=free_port(), audit_responses=str(responses),
    )  # fmt: skip
    stop = asyncio.Event()
    task = asyncio.create_task(app.main(settings, stop))
    async with asyncio.timeout(SETTLE_S):
        while not (await health(settings.health_port))[0]:
            assert not task.done(), task.exception()
            await asyncio.sleep(0.02)
    yield settings
    stop.set()
    await task
