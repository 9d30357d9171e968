"""New time limits of one sandbox: what is asked, and in which order."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from libdsec import DSecClient, InvalidRequest, Sandbox

KEY = f"dsec_01k0000000000000000000peer_{'s' * 40}"


class Asked(Sandbox):
    """Notes what it is asked; the first one takes longest."""

    def __init__(self) -> None:
        client = DSecClient("nats://h:1", KEY, "acme")
        super().__init__(client._core, "u", project="acme", state="running", id="n-u")
        self.asked: list[dict[str, Any]] = []
        self.under_way = 0

    async def _operate(self, verb: str, *, timeout_s: float = 1.0, **facts: Any) -> None:
        assert verb == "set_timeout"
        self.under_way += 1
        assert self.under_way == 1, "one overtakes another"
        await asyncio.sleep(0.03 if not self.asked else 0)
        self.asked.append(facts)
        self.under_way -= 1


async def test_none_is_never_and_what_is_left_out_is_not_asked() -> None:
    sandbox = Asked()
    await sandbox.set_timeout(None)
    await sandbox.set_timeout(600, deadline_s=None)
    await sandbox.set_timeout(deadline_s=5)
    assert sandbox.asked == [
        {"ttl_running_stop": 0.0}, {"ttl_running_stop": 600.0, "deadline_s": 0.0},
        {"deadline_s": 5.0},
    ]  # fmt: skip
    for nothing in ({}, {"deadline_s": 0}, {"ttl_running_stop": -1}):
        with pytest.raises(InvalidRequest):
            await sandbox.set_timeout(**nothing)  # type: ignore[arg-type]


async def test_calls_are_asked_in_the_order_in_which_they_begin() -> None:
    """(L17)"""
    sandbox = Asked()
    await asyncio.gather(*(sandbox.set_timeout(deadline_s=s) for s in range(1, 9)))
    assert [facts["deadline_s"] for facts in sandbox.asked] == [float(s) for s in range(1, 9)]
