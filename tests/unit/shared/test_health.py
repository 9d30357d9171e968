"""Health never hangs and shows every failing check."""

from __future__ import annotations

import asyncio
import json

import pytest

from devstack.supervised import health as ask
from shared import health
from shared.errors import Unavailable
from shared.health import Health


async def good() -> None:
    return None


async def bad() -> None:
    raise Unavailable("database: gone")


async def hanging() -> None:
    await asyncio.sleep(3600)


async def test_all_good_is_200_and_one_bad_is_503_with_the_reason() -> None:
    made = Health("test")
    made.add("bus", good)
    port = await made.serve(0)
    assert await ask(port) == (True, "ready")
    made.add("database", bad)
    assert await ask(port) == (False, "database: Unavailable: database: gone")
    await made.close()


async def test_counters_are_told_as_they_are() -> None:
    made, value = Health("test"), 1
    made.count("given_up", lambda: value)
    port = await made.serve(0)
    value = 2
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /health HTTP/1.1\r\n\r\n")
    answer = (await reader.read()).decode().partition("\r\n\r\n")[2]
    writer.close()
    await made.close()
    assert json.loads(answer)["counters"] == {"given_up": 2}


async def test_a_hanging_check_is_reported_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "CHECK_S", 0.2)
    made = Health("test")
    made.add("slow", hanging)
    made.add("bus", good)
    async with asyncio.timeout(60):
        assert await made.report() == {"slow": "no answer in 0.2 s", "bus": "ok"}


async def test_a_silent_or_rude_client_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "CHECK_S", 60.0)  # the silent ones are still there
    made = Health("test")
    made.add("bus", good)
    port = await made.serve(0)
    silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
    _, rude = await asyncio.open_connection("127.0.0.1", port)
    rude.write(b"\x00" * 200_000)
    rude.close()
    assert await ask(port) == (True, "ready")
    for _, writer in silent:
        writer.close()
    await made.close()


async def test_the_body_is_json_and_as_long_as_it_says() -> None:
    async def odd() -> None:
        raise ValueError("größer ☃")

    made = Health("test")
    made.add("odd", odd)
    port = await made.serve(0)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /health HTTP/1.1\r\n\r\n")
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    length = int(head.split(b"Content-Length: ")[1].split(b"\r\n")[0])
    assert length == len(body)
    assert "größer" in json.loads(body)["checks"]["odd"]
    writer.close()
    await made.close()
