"""Where registries may lead: nowhere that only this machine can reach."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.imagesvc.intake import named_hosts
from services.imagesvc.meter import Meter
from services.imagesvc.names import parse_registry
from services.imagesvc.registry import REDIRECTS_MAX, Registries
from services.imagesvc.sources import RegistrySource
from services.imagesvc.spool import Spool
from shared.errors import DsecError, Forbidden, InvalidRequest, Unavailable

ADDRESSES = {"public.host": "8.8.8.8", "inside.host": "10.1.2.3", "mapped.host": "::ffff:127.0.0.1"}
CLIENT = httpx.Client


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., DsecError]:
    """Asks ``a.host`` for an image; ``answer`` stands for all hosts. What comes is no image."""

    def resolved(host: str, *_: Any, **__: Any) -> list[Any]:
        return [(0, 0, 0, "", (ADDRESSES.get(host, host), 0))]

    def asked(
        answer: Callable[[httpx.Request], httpx.Response], *, named: str = "", plain: bool = False,
        reference: str = ":1",
    ) -> DsecError:  # fmt: skip
        monkeypatch.setattr(
            httpx, "Client",
            lambda **options: CLIENT(transport=httpx.MockTransport(answer), **options),
        )  # fmt: skip
        monkeypatch.setattr(socket, "getaddrinfo", resolved)
        source = RegistrySource(parse_registry(f"a.host/x{reference}"), plain_http=plain)
        with Spool(tmp_path, 10_000, lambda done: None) as spool, pytest.raises(DsecError) as told:
            Registries(named=named_hosts(named)).image(
                source, spool, Meter(None, lambda: False)
            )
        return told.value

    return asked


def leading(target: str, seen: list[httpx.Request]) -> Callable[[httpx.Request], httpx.Response]:
    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        if request.url.host == "a.host":
            return httpx.Response(307, headers={"location": target})
        return httpx.Response(404)

    return answer


@pytest.mark.parametrize(
    "target",
    ["https://169.254.169.254/x", "https://127.0.0.1:8222/x", "https://inside.host/x",
     "https://mapped.host/x", "https://[::1]/x", "http://public.host/x", "ftp://public.host/x"],
)  # fmt: skip
def test_it_leads_to_nothing_inside(target: str, ask: Callable[..., DsecError]) -> None:
    seen: list[httpx.Request] = []
    assert isinstance(ask(leading(target, seen), named="*"), Forbidden)
    assert [request.url.host for request in seen] == ["a.host"]


def test_it_leads_to_the_public_and_to_what_is_named(ask: Callable[..., DsecError]) -> None:
    for target, named in (("https://public.host/x", "*"),
                          ("https://inside.host/x", "a.host, https://inside.host")):  # fmt: skip
        seen: list[httpx.Request] = []
        ask(leading(target, seen), named=named)
        assert len(seen) == 2


def test_it_leads_to_an_end(ask: Callable[..., DsecError]) -> None:
    seen: list[httpx.Request] = []
    assert isinstance(ask(leading("https://a.host/y", seen)), Unavailable)
    assert len(seen) == REDIRECTS_MAX + 1


def test_a_log_in_is_nothing_inside(ask: Callable[..., DsecError]) -> None:
    seen = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.url.host)
        return httpx.Response(
            401, headers={"www-authenticate": 'Bearer realm="https://inside.host/token"'}
        )

    assert isinstance(ask(answer), Forbidden)
    assert seen == ["a.host"]


def test_a_mismatch_does_not_tell_what_came(ask: Callable[..., DsecError]) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, stream=httpx.ByteStream(b"s"))

    error = ask(answer, reference="@sha256:" + "0" * 64)
    assert isinstance(error, InvalidRequest)
    assert hashlib.sha256(b"s").hexdigest() not in error.message
