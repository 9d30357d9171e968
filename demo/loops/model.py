"""A model for the demonstration: it writes one line of a file a turn, as it is told.

Owns: an HTTP endpoint on loopback that says the same in other words each time it is asked,
as a model does from which answers are sampled. Does not own: anything clever; real runs name
a real endpoint as the route ``model``.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

ANSWER_S = 0.05
"""How long it thinks."""


def next_command(task: dict[str, Any], said: list[dict[str, Any]]) -> str | None:
    """The command of this turn: ``task`` names a ``file`` and its ``lines``."""
    lines = task["lines"]
    if len(said) >= len(lines):
        return None
    return f"echo {lines[len(said)]} >> {task['file']}  # {secrets.token_hex(4)}"


class Model:
    """Counts how often it was asked what."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request, one answer."""
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            length = int(head.partition("content-length:")[2].partition("\r\n")[0])
            body = await reader.readexactly(length)
            question = json.loads(body)
            self.asked[body.decode()] += 1
            await asyncio.sleep(ANSWER_S)
            answer = json.dumps({"command": next_command(question["task"], question["said"])})
            head = f"HTTP/1.0 200 OK\r\nContent-Length: {len(answer)}\r\n\r\n"
            writer.write(head.encode() + answer.encode())
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # whoever asked is gone, and asks again
        finally:
            writer.close()


@asynccontextmanager
async def serving(port: int = 0) -> AsyncIterator[tuple[Model, int]]:
    """The model, and its port on loopback."""
    model = Model()
    server = await asyncio.start_server(model.answer, "127.0.0.1", port)
    async with server:
        yield model, server.sockets[0].getsockname()[1]
