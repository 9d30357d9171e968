"""Secrets put into the requests of one sandbox.

Owns: which requests of which hosts carry what, judged anew for each of them, with values
that are asked for and never kept beside it. Does not own: where values come from, whether
a host may be reached (the gate). A value goes to a host that the gate itself resolved,
and over TLS only after that host's certificate was verified, unless the secret may go
over plain HTTP.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from socket import socket

import h11

from schemas.secret import GivenSecret
from services.edge.drivers.base import Secret
from services.edge.egress.certificates import Authority
from services.edge.egress.names import HANDSHAKE
from services.edge.egress.requests import Refusal, Relay
from services.edge.egress.sides import Plain, Side, Tls, Traffic
from shared.errors import DsecError

WEB_PORTS = frozenset({443, 80})
BASIC = b"basic "
HANDSHAKE_S = 15.0

Values = Callable[[], Awaitable[Mapping[str, GivenSecret]]]
"""The present values by name. Raises ``DsecError`` where they cannot be had."""


@dataclass(frozen=True, slots=True)
class Change:
    """What one secret does to the headers of a request."""

    placeholder: bytes
    value: bytes
    header: bytes = b""
    format: bytes = b"{}"


class Injector:
    """See the module. ``bound`` are the secrets of the sandbox."""

    def __init__(
        self, bound: Sequence[Secret], values: Values, authority: Authority
    ) -> None:
        self._values, self._authority = values, authority
        self._bound: dict[tuple[str, int], list[Secret]] = {}
        for one in bound:
            for host in one.hosts:
                for place in _places(host):
                    self._bound.setdefault(place, []).append(one)

    def takes(self, name: str, port: int) -> bool:
        """Whether requests to ``name`` carry a secret."""
        return (name, port) in self._bound

    async def relay(
        self, inner: socket, outer: socket, first: bytes, *, name: str, port: int,
        traffic: Traffic,
    ) -> None:  # fmt: skip
        """Carries requests until one end has enough. Raises ``OSError``."""
        below, secure = Plain(inner, first, traffic), first[:1] == bytes([HANDSHAKE])
        side: Side = below
        if secure:
            side = tls = Tls(below, self._authority.inside(name), server=True)
            async with asyncio.timeout(HANDSHAKE_S):
                await tls.shake()

        async def connect() -> Side:
            return await self._verified(outer, name) if secure else Plain(outer)

        async def edit(request: h11.Request) -> h11.Request:
            return await self._edit(request, name, port, secure=secure)

        await Relay(side, connect, edit).run()

    async def _verified(self, outer: socket, name: str) -> Side:
        tls = Tls(Plain(outer), self._authority.outside(), host=name)
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                await tls.shake()
        except ssl.SSLCertVerificationError as err:
            raise Refusal(502, f"the certificate of {name}: {err.verify_message}") from err
        except (OSError, TimeoutError) as err:
            raise Refusal(502, f"no TLS with {name}") from err
        return tls

    async def _edit(
        self, request: h11.Request, name: str, port: int, *, secure: bool
    ) -> h11.Request:
        if _host(request) != name or request.target[:1] not in (b"/", b"*"):
            raise Refusal(421, f"this connection is for {name}")
        if request.method == b"TRACE":
            raise Refusal(405, "its answer would show what was put in")
        try:
            values = await self._values()
        except DsecError as err:
            raise Refusal(502, f"secrets cannot be had: {err.code}") from err
        changes = []
        for one in self._bound[name, port]:
            given = values.get(one.name)
            if given is None:
                raise Refusal(502, f"secret {one.name} is not there any more")
            if secure or given.plain:
                changes.append(_change(one, given))
        return changed(request, changes)


def _places(host: str) -> list[tuple[str, int]]:
    name, _, port = host.partition(":")
    return [(name, int(port))] if port else [(name, port) for port in WEB_PORTS]


def _host(request: h11.Request) -> str:
    (host,) = [value for name, value in request.headers if name == b"host"] or [b""]
    return host.decode("latin-1").lower().partition(":")[0].rstrip(".")


def _change(one: Secret, given: GivenSecret) -> Change:
    header = one.header.lower().encode() if one.header else b""
    return Change(
        one.placeholder.encode(), given.value.encode(), header, one.format.encode()
    )


def changed(request: h11.Request, changes: Sequence[Change]) -> h11.Request:
    """The request with its headers changed. Pure."""
    headers = [
        (raw, _filled(raw.lower(), value, changes))
        for raw, value in request.headers.raw_items()
        if not any(change.header == raw.lower() for change in changes)
    ]
    headers += [
        (change.header, change.format.replace(b"{}", change.value))
        for change in changes if change.header
    ]  # fmt: skip
    return h11.Request(
        method=request.method, target=request.target, headers=headers,
        http_version=request.http_version,
    )  # fmt: skip


def _filled(name: bytes, value: bytes, changes: Sequence[Change]) -> bytes:
    basic = name == b"authorization" and value[: len(BASIC)].lower() == BASIC
    said = _decoded(value[len(BASIC) :]) if basic else None
    for change in changes:
        value = value.replace(change.placeholder, change.value)
        said = said.replace(change.placeholder, change.value) if said else said
    if said is None or said == _decoded(value[len(BASIC) :]):
        return value
    return value[: len(BASIC)] + base64.b64encode(said)


def _decoded(text: bytes) -> bytes | None:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error:
        return None
