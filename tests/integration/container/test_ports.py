"""Ports of real containers: whose network it is, what a connection costs, how it ends."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest

from services.edge.drivers.base import Handle
from services.edge.drivers.container import ContainerDriver
from shared.errors import DsecError, NotFound
from tests.conformance.callers import Caller
from tests.conformance.harness import new_uid, run, until
from tests.integration.container.harness import ContainerHarness

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.docker]

WAIT_S = 60.0
ECHO = "(trap '' HUP; nc -ll -p {port} -e cat </dev/null >/dev/null 2>&1 &)"


async def echo(driver: ContainerDriver, sandbox: Handle, port: int) -> None:
    await run(driver, sandbox, ECHO.format(port=port))
    await driver.dial(sandbox, port, Caller(None), wait_s=WAIT_S)


async def test_the_network_is_the_sandboxs(driver: ContainerDriver, sandbox: Handle) -> None:
    with socket.create_server(("127.0.0.1", 0)) as here:
        here.settimeout(0.2)
        port = here.getsockname()[1]
        with pytest.raises(NotFound):
            await driver.dial(sandbox, port, Caller(None))
        await echo(driver, sandbox, port)
        io = Caller(b"inside", None)
        await driver.dial(sandbox, port, io)
        assert bytes(io.got) == b"inside"
        with pytest.raises(TimeoutError):
            here.accept()


async def test_megabytes_come_back(driver: ContainerDriver, sandbox: Handle) -> None:
    await echo(driver, sandbox, 7000)
    data = os.urandom(8 << 20)
    io = Caller(data, None)
    await driver.dial(sandbox, 7000, io)
    assert bytes(io.got) == data


async def test_a_sandbox_without_room_for_a_process_is_reached(
    harness: ContainerHarness, driver: ContainerDriver
) -> None:
    sandbox = await driver.start(harness.spec(uid=new_uid(), pids=12))
    try:
        await run(driver, sandbox, "(nc -l -p 7000 -e cat >/dev/null 2>&1 &)")
        fill = "i=0; while [ $i -lt 40 ]; do sleep 30 & i=$((i+1)); done"
        full = await run(driver, sandbox, fill)
        assert b"fork" in full.stderr
        io = Caller(b"x", None)
        await driver.dial(sandbox, 7000, io, wait_s=WAIT_S)
        assert bytes(io.got) == b"x"
    finally:
        await driver.stop(sandbox)


async def test_what_ends_a_sandbox_ends_its_connections(
    harness: ContainerHarness, driver: ContainerDriver
) -> None:
    sandbox = await driver.start(harness.spec(uid=new_uid()))
    await echo(driver, sandbox, 7000)
    io = Caller(b"x")
    dialling = asyncio.create_task(driver.dial(sandbox, 7000, io))
    await until(lambda: bytes(io.got) == b"x")
    await driver.stop(sandbox)
    with pytest.raises(DsecError):
        await asyncio.wait_for(dialling, WAIT_S)


async def test_a_new_edge_ends_the_connections_of_the_old_one(
    harness: ContainerHarness, driver: ContainerDriver
) -> None:
    spec = harness.spec(uid=new_uid())
    sandbox = await driver.start(spec)
    await echo(driver, sandbox, 7000)
    io = Caller(b"x")
    dialling = asyncio.create_task(driver.dial(sandbox, 7000, io))
    await until(lambda: bytes(io.got) == b"x")
    later = await harness.restart()
    found = await later.recover(sandbox, spec)
    assert found is not None
    with pytest.raises(DsecError):
        await asyncio.wait_for(dialling, WAIT_S)
    again = Caller(b"again", None)
    await later.dial(found, 7000, again)
    assert bytes(again.got) == b"again"
    await later.stop(found)
