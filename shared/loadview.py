"""The load view in Redis: the last heartbeat of every node, nothing else.

Owns: keys ``dsec:load:<node>`` and the set ``dsec:nodes``. It can be flushed at
any moment: the next heartbeats fill it again. Written by the watcher only.
"""

from __future__ import annotations

import redis.asyncio as redis
from redis.exceptions import RedisError

from schemas.base import BadMessage, decode, encode
from schemas.node import Heartbeat
from shared.errors import Unavailable

NODES = "dsec:nodes"
LOAD = "dsec:load:"
TTL_S = 15
CALL_S = 2.0
"""Longest wait for one answer of Redis."""


class LoadView:
    """Reads and writes the view. All calls raise ``Unavailable`` without Redis."""

    def __init__(self, url: str) -> None:
        self._redis = redis.Redis.from_url(
            url, socket_timeout=CALL_S, socket_connect_timeout=CALL_S, health_check_interval=10
        )

    async def write(self, beats: list[Heartbeat]) -> None:
        """Stores heartbeats; each lives ``TTL_S`` seconds."""
        if not beats:
            return
        try:
            async with self._redis.pipeline(transaction=False) as pipe:
                for beat in beats:
                    pipe.set(LOAD + beat.node, encode(beat), ex=TTL_S)
                pipe.sadd(NODES, *[beat.node for beat in beats])
                await pipe.execute()
        except (RedisError, OSError) as exc:
            raise Unavailable(f"load view: {exc}") from exc

    async def read(self) -> dict[str, Heartbeat]:
        """The last heartbeat of every node that sent one within ``TTL_S``."""
        try:
            nodes = sorted(_text(n) for n in await self._redis.smembers(NODES))
            if not nodes:
                return {}
            values = await self._redis.mget([LOAD + n for n in nodes])
            gone = [n for n, v in zip(nodes, values, strict=True) if v is None]
            if gone:
                await self._redis.srem(NODES, *gone)
        except (RedisError, OSError) as exc:
            raise Unavailable(f"load view: {exc}") from exc
        view: dict[str, Heartbeat] = {}
        for node, value in zip(nodes, values, strict=True):
            if value is not None:
                try:
                    view[node] = decode(_text(value).encode(), Heartbeat)
                except BadMessage:  # another version's entry: as good as none
                    continue
        return view

    async def ping(self) -> None:
        """Raises ``Unavailable`` when Redis does not answer."""
        try:
            await self._redis.ping()
        except (RedisError, OSError) as exc:
            raise Unavailable(f"load view: {exc}") from exc

    async def close(self) -> None:
        """Closes connections."""
        await self._redis.aclose()


def _text(value: bytes | str) -> str:
    # the client's types allow for either, whatever it is configured to
    return value.decode() if isinstance(value, bytes) else value
