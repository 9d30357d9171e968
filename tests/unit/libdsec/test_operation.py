"""An operation asks again when nobody listened, however soon it hears of that."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from libdsec import _operation
from libdsec._operation import Operation
from libdsec._wire import ExecReply, ExecRequest


class Operations:
    """Those of a link on which nobody listens at first. It says so while the request is
    still being sent."""

    def __init__(self, deaf: int) -> None:
        self.deaf = deaf
        self.asked = 0
        config = SimpleNamespace(principal="p")
        self.link = SimpleNamespace(config=config, connection="c", publish=self.publish)
        self.live: Operation[ExecReply] | None = None

    async def publish(self, _subject: str, _data: bytes, **_more: Any) -> None:
        self.asked += 1
        assert self.live is not None
        if self.asked <= self.deaf:
            self.live.nobody()
        await asyncio.sleep(0)

    def add(self, operation: Operation[ExecReply]) -> None:
        self.live = operation

    def remove(self, _operation: Operation[ExecReply]) -> None:
        return

    def rename(self, operation: Operation[ExecReply], token: str) -> None:
        operation.token = token

    def spawn(self, work: Any) -> asyncio.Task[Any]:
        return asyncio.ensure_future(work)


async def test_an_answer_that_comes_while_it_is_still_sent_is_heard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_operation, "RETRY_S", 0.001)
    monkeypatch.setattr(_operation, "MAX_RETRY_S", 0.002)
    operations = Operations(deaf=5)

    async def alive() -> None:
        return None

    operation = Operation(
        cast("Any", operations), ("project", "node", "uid"), verb="exec",
        request=ExecRequest(op_id="op", argv=["true"]), reply_type=ExecReply, verdict=alive,
    )  # fmt: skip
    await operation.start()
    async with asyncio.timeout(60):
        while operations.asked <= operations.deaf:
            await asyncio.sleep(0.001)
