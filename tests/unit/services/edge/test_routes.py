"""Which addresses a node knows by name, and specs that ask for others."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from schemas.sandbox import SandboxSpec
from services.edge import routes
from services.edge.drivers.base import BackendReport, Feature
from services.edge.routes import Address, Routes, parse
from services.edge.sandbox import rules
from services.edge.sandbox.ending import Fate
from shared.errors import Conflict, InvalidRequest

BUS = "nats://10.0.0.1:4222"


def test_the_bus_is_known_and_others_are_written_down() -> None:
    known = parse("model=10.0.0.7:8000, web=[::1]:80", bus=BUS)
    assert known == {
        "bus": Address("10.0.0.1", 4222), "model": Address("10.0.0.7", 8000),
        "web": Address("::1", 80),
    }  # fmt: skip
    assert parse("", bus="nats://user:word@host:1,nats://other:2") == {"bus": Address("host", 1)}


@pytest.mark.parametrize(
    "text", ["model", "model=", "model=host", "model=host:0", "model=host:x", "M=host:1",
             "bus=host:1", "=host:1", "model=:80"],
)  # fmt: skip
def test_what_is_no_route_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(text, bus=BUS)
    assert caught.value.field == "routes"


def test_a_node_gives_the_routes_it_knows_by_backends_that_carry_them() -> None:
    spec = SandboxSpec(routes={"model": 8000, "bus": 4222})
    assert rules.check_routes(spec, {"bus", "model", "web"}) is None
    refused = rules.check_routes(spec, {"bus"})
    assert refused is not None and refused.field == "routes" and "model" in refused.message
    assert rules.check_spec(spec, BackendReport(True, "", {"routes": Feature(True)})) is None
    without = rules.check_spec(spec, BackendReport(True, "", {}))
    assert without is not None and without.field == "routes"


class Listening:
    """A backend whose agent listens when it is told to, at some ports never or not at all."""

    def __init__(self) -> None:
        self.slow, self.deaf = asyncio.Event(), {9}

    async def accept(self, _handle: Any, port: int, _io: Any, *, listens: asyncio.Event) -> None:
        if port == 7:
            raise Conflict("another listens there", field="port")
        await self.slow.wait()
        if port not in self.deaf:
            listens.set()
        await asyncio.Event().wait()


def sandbox(driver: Listening, **wanted: int) -> Any:
    spec = SandboxSpec(routes=wanted)
    return SimpleNamespace(
        uid="u", ending=None, fate=Fate(), driver=driver, present=lambda: object(),
        accepted=SimpleNamespace(resolved=SimpleNamespace(spec=spec)),
    )  # fmt: skip


async def test_a_sandbox_is_served_when_its_ports_listen() -> None:
    known = {"model": Address("127.0.0.1", 1), "bus": Address("127.0.0.1", 2)}
    driver, served = Listening(), Routes(known, most=8)
    serving = asyncio.create_task(served.serve(sandbox(driver, model=8000, bus=4222)))
    await asyncio.sleep(0.05)
    assert not serving.done()
    driver.slow.set()
    await asyncio.wait_for(serving, 60)
    await served.close()


async def test_a_port_that_another_has_and_an_agent_that_is_silent_hold_nothing_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = {"model": Address("127.0.0.1", 1)}
    driver, served = Listening(), Routes(known, most=8)
    await asyncio.wait_for(served.serve(sandbox(driver, model=7)), 60)
    monkeypatch.setattr(routes, "LISTEN_S", 0.05)
    driver.slow.set()
    await asyncio.wait_for(served.serve(sandbox(driver, model=9)), 60)
    await asyncio.wait_for(served.serve(sandbox(driver)), 60)
    await served.close()
