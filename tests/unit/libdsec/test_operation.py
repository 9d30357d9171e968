"""An operation asks again when nobody listened, however soon it hears of that."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from libdsec import _operation
from libdsec._operation import Operation
from libdsec._wire import HEADER_AGAIN, ExecReply, ExecRequest


class Operations:
    """Those of a link on which nobody listens at first. It says so while the request is
    still being sent."""

    def __init__(self, deaf: int) -> None:
        self.deaf = deaf
        self.asked = 0
        self.marked: list[bool] = []
        config = SimpleNamespace(principal="p")
        self.link = SimpleNamespace(config=config, connection="c", publish=self.publish)
        self.live: Operation[ExecReply] | None = None

    async def publish(self, _subject: str, _data: bytes, **more: Any) -> None:
        self.asked += 1
        self.marked.append(HEADER_AGAIN in (more["headers"] or {}))
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


async def alive() -> None:
    return None


def operation_of(operations: Operations) -> Operation[ExecReply]:
    return Operation(
        cast("Any", operations), ("project", "node", "uid"), verb="exec",
        request=ExecRequest(op_id="op", argv=["true"]), reply_type=ExecReply, verdict=alive,
    )  # fmt: skip


async def test_an_answer_that_comes_while_it_is_still_sent_is_heard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_operation, "RETRY_S", 0.001)
    monkeypatch.setattr(_operation, "MAX_RETRY_S", 0.002)
    operations = Operations(deaf=5)
    operation = operation_of(operations)
    await operation.start()
    async with asyncio.timeout(60):
        while operations.asked <= operations.deaf:
            await asyncio.sleep(0.001)
    # though nothing was heard: it may have run so long ago that the journal alone knows it
    assert operations.marked == [False] + [True] * 5


async def test_an_outage_is_no_silence_of_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server was away, or this process stood still, for longer than a node may be silent:
    the node is asked, and only what it does not answer then counts."""
    now = 1000.0
    monkeypatch.setattr(_operation.time, "monotonic", lambda: now)
    operations = Operations(deaf=0)
    operation = operation_of(operations)
    await operation.start()
    operation.on_frame("k", b"", None)

    async def asks(after_s: float) -> bool:
        nonlocal now
        now += after_s
        before = operations.asked
        operation.reattach()
        assert operation._asking is not None
        await asyncio.wait({operation._asking})
        return operations.asked > before

    assert await asks(2 * _operation.UNREACHABLE_S), "it was given up unasked"
    for _ in range(2):
        assert await asks(_operation.SILENCE_S)
    operation.on_frame("k", b"", None)
    for _ in range(3):
        assert await asks(_operation.SILENCE_S)
    assert not await asks(_operation.SILENCE_S), "a node that answers nothing is given up"
    assert operation.done
