"""Connections to what listens in a sandbox."""

from __future__ import annotations

import asyncio

import pytest

from services.edge.drivers.base import Driver, Handle, Ports
from shared.errors import NotFound
from tests.conformance.callers import Caller
from tests.conformance.harness import run

pytestmark = pytest.mark.asyncio(loop_scope="module")

WAIT_S = 60.0


async def ports_of(driver: Driver) -> Ports:
    feature = (await driver.probe()).features["ports"]
    assert feature.supported == isinstance(driver, Ports)
    if not isinstance(driver, Ports):
        assert feature.reason
        pytest.skip(f"{driver.name}: {feature.reason}")
    return driver


async def test_a_port_is_reached_once_something_listens(driver: Driver, sandbox: Handle) -> None:
    ports, io = await ports_of(driver), Caller(b"hello", None)
    dialling = asyncio.create_task(ports.dial(sandbox, 7000, io, wait_s=WAIT_S))
    serving = asyncio.create_task(run(driver, sandbox, "sleep .3; nc -l -p 7000 -e cat"))
    await asyncio.wait_for(dialling, WAIT_S)
    assert (bytes(io.got), (await serving).code) == (b"hello", 0)


async def test_a_port_where_nothing_listens_is_named(driver: Driver, sandbox: Handle) -> None:
    ports = await ports_of(driver)
    with pytest.raises(NotFound, match="7001") as caught:
        await ports.dial(sandbox, 7001, Caller(None))
    assert (caught.value.field, caught.value.details["errno"]) == ("port", "ECONNREFUSED")
