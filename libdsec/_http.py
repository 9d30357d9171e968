"""httpx clients whose connections are a sandbox's ports: no listener on this machine.

Owns: httpcore's network backends over :class:`libdsec.ports.Connection`, the transports
around its pools. Does not own: connections. Needs httpx, the extra ``http``.

Hosts other than the sandbox's localhost are refused: what answers is not trusted, and a
redirect must not lead a client into networks that the sandbox cannot reach.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from typing import Any

import httpcore
import httpx

from libdsec._portal import portal
from libdsec.args import Seconds, seconds
from libdsec.errors import DSecError
from libdsec.ports import Connection

HOSTS = frozenset({"localhost", "127.0.0.1", "::1", "[::1]"})
MAX_CONNECTIONS = 64
"""At once, of one client; more requests wait for one of them."""
KEPT_CONNECTIONS = 16
KEPT_S = 5.0
"""How many connections without a request are kept, and how long."""
POOL: dict[str, Any] = {
    "max_connections": MAX_CONNECTIONS,
    "max_keepalive_connections": KEPT_CONNECTIONS,
    "keepalive_expiry": KEPT_S,
}

Dial = Callable[..., Coroutine[Any, Any, Connection]]


@contextlib.asynccontextmanager
async def _within(
    timeout: float | None, late: type[Exception], broken: type[Exception]
) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(timeout):
            yield
    except TimeoutError as exc:
        raise late(f"not within {timeout:g} s") from exc
    except DSecError as exc:
        raise broken(str(exc)) from exc


async def _connect(
    dial: Dial, host: str, port: int, *, timeout: float | None, wait: Seconds | None
) -> _Stream:
    if host not in HOSTS:
        raise httpcore.ConnectError(f"{host} is not this sandbox: only localhost is")
    more = seconds(wait, "wait") or 0.0
    limit = None if timeout is None else timeout + more
    async with _within(limit, httpcore.ConnectTimeout, httpcore.ConnectError):
        return _Stream(await dial(port, wait=wait))


class _Stream(httpcore.AsyncNetworkStream):
    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        async with _within(timeout, httpcore.ReadTimeout, httpcore.ReadError):
            return await self.connection.read(max_bytes)

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        async with _within(timeout, httpcore.WriteTimeout, httpcore.WriteError):
            await self.connection.write(buffer)

    async def aclose(self) -> None:
        await self.connection.close()

    async def start_tls(self, *_args: Any, **_kw: Any) -> httpcore.AsyncNetworkStream:
        raise httpcore.ConnectError("no TLS inside a sandbox's connection: use port()")

    def get_extra_info(self, info: str) -> Any:
        return self.connection.readable if info == "is_readable" else None


class _Backend(httpcore.AsyncNetworkBackend):
    def __init__(self, dial: Dial, wait: Seconds | None) -> None:
        self._dial, self._wait = dial, wait

    async def connect_tcp(
        self, host: str, port: int, timeout: float | None = None, *_args: Any, **_kw: Any
    ) -> httpcore.AsyncNetworkStream:
        return await _connect(self._dial, host, port, timeout=timeout, wait=self._wait)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class _SyncStream(httpcore.NetworkStream):
    def __init__(self, stream: _Stream) -> None:
        self._stream = stream

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return portal().call(self._stream.read(max_bytes, timeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        portal().call(self._stream.write(buffer, timeout))

    def close(self) -> None:
        portal().call(self._stream.aclose())

    def start_tls(self, *_args: Any, **_kw: Any) -> httpcore.NetworkStream:
        raise httpcore.ConnectError("no TLS inside a sandbox's connection: use port()")

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


class _SyncBackend(httpcore.NetworkBackend):
    def __init__(self, dial: Dial, wait: Seconds | None) -> None:
        self._dial, self._wait = dial, wait

    def connect_tcp(
        self, host: str, port: int, timeout: float | None = None, *_args: Any, **_kw: Any
    ) -> httpcore.NetworkStream:
        made = _connect(self._dial, host, port, timeout=timeout, wait=self._wait)
        return _SyncStream(portal().call(made))


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """httpcore's errors as httpx's, which have the same names."""
    try:
        yield
    except Exception as exc:
        known = getattr(httpx, type(exc).__name__, None)
        if known is None or type(exc).__module__.partition(".")[0] != "httpcore":
            raise
        raise known(str(exc)) from exc


def _request(request: httpx.Request) -> httpcore.Request:
    url = request.url
    return httpcore.Request(
        method=request.method,
        url=httpcore.URL(
            scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path
        ),
        headers=request.headers.raw,
        content=request.stream,
        extensions=request.extensions,
    )


def _response(response: httpcore.Response, stream: Any) -> httpx.Response:
    return httpx.Response(
        response.status, headers=response.headers, stream=stream, extensions=response.extensions
    )


class _Body(httpx.AsyncByteStream):
    def __init__(self, stream: Any) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        with _translated():
            async for part in self._stream:
                yield part

    async def aclose(self) -> None:
        await self._stream.aclose()


class _SyncBody(httpx.SyncByteStream):
    def __init__(self, stream: Any) -> None:
        self._stream: Any = stream

    def __iter__(self) -> Iterator[bytes]:
        with _translated():
            parts: Iterable[bytes] = self._stream
            yield from parts

    def close(self) -> None:
        self._stream.close()


class _Transport(httpx.AsyncBaseTransport):
    def __init__(self, dial: Dial, wait: Seconds | None) -> None:
        self._pool = httpcore.AsyncConnectionPool(network_backend=_Backend(dial, wait), **POOL)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        with _translated():
            response = await self._pool.handle_async_request(_request(request))
        return _response(response, _Body(response.stream))

    async def aclose(self) -> None:
        await self._pool.aclose()


class _SyncTransport(httpx.BaseTransport):
    def __init__(self, dial: Dial, wait: Seconds | None) -> None:
        self._pool = httpcore.ConnectionPool(network_backend=_SyncBackend(dial, wait), **POOL)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        with _translated():
            response = self._pool.handle_request(_request(request))
        return _response(response, _SyncBody(response.stream))

    def close(self) -> None:
        self._pool.close()


def _options(port: int, options: dict[str, Any]) -> dict[str, Any]:
    # the environment's proxies are for networks, and would see what is the sandbox's
    return {"base_url": f"http://localhost:{port}", "trust_env": False, **options}


def async_client(
    dial: Dial, port: int, *, wait: Seconds | None = None, **options: Any
) -> httpx.AsyncClient:
    """See :meth:`libdsec.Sandbox.http`."""
    return httpx.AsyncClient(transport=_Transport(dial, wait), **_options(port, options))


def sync_client(
    dial: Dial, port: int, *, wait: Seconds | None = None, **options: Any
) -> httpx.Client:
    """The same for code without a loop."""
    return httpx.Client(transport=_SyncTransport(dial, wait), **_options(port, options))
