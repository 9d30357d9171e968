"""Ports without a sandbox: arguments, errors, what is missing."""

from __future__ import annotations

import pickle
import sys
from typing import Any

import pytest

from libdsec import (
    Conflict,
    DeadlineExceeded,
    DSecClient,
    InvalidRequest,
    NotFound,
    PortRefused,
    PortReset,
    Sandbox,
    SandboxDied,
    Unsupported,
)
from libdsec import sync as _sync  # noqa: F401 (makes the faces)
from libdsec._flow import Receiving, Sending
from libdsec._sync_face import wrap
from libdsec._wire import WireError
from libdsec.errors import InternalError, port_error

KEY = f"dsec_01k0000000000000000000peer_{'s' * 40}"


@pytest.fixture
def sandbox() -> Sandbox:
    client = DSecClient("nats://h:1", KEY, "acme")
    return Sandbox(client._core, "u", project="acme", state="running", id="n-u")


def error(code: str, errno: str | None = None, message: str = "words", **more: Any) -> WireError:
    details = {"errno": errno} if errno else {}
    return WireError(code=code, message=message, field="port", details=details, **more)


@pytest.mark.parametrize("port", [0, -1, 65536, "80", 80.0, True, None])
async def test_what_is_no_port_is_refused_here(sandbox: Sandbox, port: Any) -> None:
    for call in (sandbox.port, sandbox.http):
        with pytest.raises(InvalidRequest) as caught:
            call(port)
        assert caught.value.field == "port"
    with pytest.raises(InvalidRequest):
        await sandbox.connect(port)


def test_errors_of_ports_are_the_builtin_ones_too_and_name_the_port() -> None:
    refused = port_error(error("not_found", "ECONNREFUSED"), 80)
    assert isinstance(refused, PortRefused) and isinstance(refused, NotFound)
    assert isinstance(refused, ConnectionRefusedError) and refused.port == 80
    reset = port_error(error("conflict", "ECONNRESET"), 80)
    assert isinstance(reset, PortReset) and isinstance(reset, Conflict)
    assert isinstance(reset, ConnectionResetError) and "80" in str(reset)
    late = port_error(error("deadline_exceeded", "ETIMEDOUT"), 80)
    assert type(late) is DeadlineExceeded and late.field == "port"


def test_a_connection_that_was_there_broke_off_whatever_the_reason() -> None:
    broken = port_error(InternalError("the edge ended"), 80, connected=True)
    assert isinstance(broken, PortReset) and broken.is_infra and broken.code == "internal"
    died = SandboxDied("it died", cause="oom")
    assert port_error(died, 80, connected=True) is died
    assert type(port_error(InternalError("x"), 80)) is InternalError


def test_errors_of_ports_survive_a_process_boundary() -> None:
    made = port_error(error("not_found", "ECONNREFUSED", is_infra=False), 8080)
    again = pickle.loads(pickle.dumps(made))
    assert isinstance(again, PortRefused)
    assert (again.port, again.errno, str(again)) == (8080, made.errno, str(made))  # type: ignore[attr-defined]


def test_without_httpx_the_error_says_what_to_install(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "libdsec._http", raising=False)
    monkeypatch.delattr("libdsec._http", raising=False)
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(Unsupported, match=r"libdsec\[http\]") as caught:
        sandbox.http(8000)
    assert caught.value.field == "httpx"
    with pytest.raises(Unsupported):
        wrap(sandbox).http(8000)


def test_windows_of_a_connection_are_its_own() -> None:
    receiving = Receiving(ack_every=10)
    receiving.accept(b"x" * 10, 0)
    assert (receiving.take(9), receiving.take(1)) == (None, 10)
    sending = Sending(window=10)
    sending.push(b"x" * 10)
    assert sending.room == 0
    with pytest.raises(ValueError, match="window"):
        sending.push(b"x")


def test_a_port_that_is_not_entered_has_no_address(sandbox: Sandbox) -> None:
    port = sandbox.port(8000)
    assert (repr(port), port.error) == ("Port(8000, closed)", None)
    with pytest.raises(Conflict):
        _ = port.address
