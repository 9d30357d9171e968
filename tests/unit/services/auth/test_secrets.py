"""Kept secrets: how they lie, where they may go, what a binding must look like."""

from __future__ import annotations

import base64
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from schemas.base import encode
from schemas.sandbox import SandboxInfo, SandboxPage, SandboxSpec
from schemas.secret import (
    GivenSecret,
    SecretBinding,
    SecretInfo,
    SecretSet,
    SecretsGiven,
    SecretsWanted,
)
from services.auth import bindings, secret_store
from services.auth.asks import Ask
from services.auth.sealing import Sealer
from services.auth.secret_store import Row
from services.auth.secrets import Secrets, unvalued
from shared.bus import Incoming
from shared.clock import FakeClock
from shared.errors import Forbidden, Internal, InvalidRequest, NotFound, Unsupported


def key() -> str:
    return base64.b64encode(os.urandom(32)).decode()


def test_a_value_is_opened_as_what_it_was_sealed_for_alone() -> None:
    sealer = Sealer(key())
    sealed = sealer.seal("value", project="p", name="hub")
    assert b"value" not in sealed and sealer.seal("value", project="p", name="hub") != sealed
    assert sealer.open(sealed, project="p", name="hub") == "value"
    for project, name in (("q", "hub"), ("p", "other")):
        with pytest.raises(Internal):
            sealer.open(sealed, project=project, name=name)
    with pytest.raises(Internal):
        sealer.open(sealed[:-1] + bytes([sealed[-1] ^ 1]), project="p", name="hub")


def test_an_older_key_still_opens_and_the_first_one_seals() -> None:
    old, new = key(), key()
    sealed = Sealer(old).seal("value", project="p", name="hub")
    both = Sealer(f"{new},{old}")
    assert both.open(sealed, project="p", name="hub") == "value"
    again = both.seal("value", project="p", name="hub")
    assert Sealer(new).open(again, project="p", name="hub") == "value"
    with pytest.raises(Internal):
        Sealer(new).open(sealed, project="p", name="hub")


def test_without_a_key_nothing_is_kept_and_a_bad_one_is_refused() -> None:
    with pytest.raises(Unsupported):
        Sealer(None).seal("value", project="p", name="hub")
    for bad in ("short", base64.b64encode(b"x" * 16).decode()):
        with pytest.raises(InvalidRequest) as caught:
            Sealer(bad)
        assert bad not in str(caught.value)


INFO = SecretInfo(
    name="hub", version=1, hosts=["api.test", "*.hub.test", "own.test:8443"], plain=False,
    changed_at=0.0, changed_by="",
)  # fmt: skip


def spec(**binding: object) -> SandboxSpec:
    given = {"hosts": ["api.test"], "header": "X-Key", **binding}
    return SandboxSpec(secrets={"hub": SecretBinding(**given)})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "hosts", [["api.test"], ["a.hub.test", "b.a.hub.test"], ["own.test:8443"]]
)
def test_a_secret_goes_where_it_may(hosts: list[str]) -> None:
    bindings.judge(spec(hosts=hosts), {"hub": INFO})


@pytest.mark.parametrize(
    "host", ["evil.test", "hub.test", "evilhub.test", "api.test:8443", "own.test", "sub.api.test"]
)
def test_a_secret_goes_nowhere_else(host: str) -> None:
    with pytest.raises(Forbidden) as caught:
        bindings.judge(spec(hosts=["api.test", host]), {"hub": INFO})
    assert caught.value.field == "secrets.hub.hosts" and host in str(caught.value)


def test_a_secret_that_is_not_there_is_named() -> None:
    with pytest.raises(NotFound) as caught:
        bindings.judge(spec(), {})
    assert caught.value.field == "secrets.hub"


@pytest.mark.parametrize(
    ("binding", "field"),
    [
        ({"header": None}, "secrets.hub"),
        ({"header": "Host"}, "secrets.hub.header"),
        ({"header": "Content-Length"}, "secrets.hub.header"),
        ({"format": "Bearer"}, "secrets.hub.format"),
        ({"format": "{} {}"}, "secrets.hub.format"),
        ({"format": "x\r\nHost: y{}"}, "secrets.hub.format"),
        ({"env": "TAKEN"}, "secrets.hub.env"),
    ],
)
def test_a_binding_that_makes_no_sense_is_refused_by_field(
    binding: dict[str, object], field: str
) -> None:
    given = spec(**binding)
    with pytest.raises(InvalidRequest) as caught:
        bindings.check_spec(SandboxSpec(secrets=given.secrets, env={"TAKEN": "1"}))
    assert caught.value.field == field


@pytest.mark.parametrize("value", ["two\nlines", "tab\t", " led", "trailed ", "ümlaut", "nul\0"])
def test_a_value_is_one_line_of_a_header_and_no_error_shows_it(value: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        bindings.check_value(value)
    assert value not in str(caught.value)


def test_nothing_that_carries_a_value_shows_it() -> None:
    """Not in its text, and its record holds no digest to try guesses on."""
    value = "guess-me"
    wanted = SecretSet(request_id="r", name="hub", value=value, hosts=["api.test"])
    given = GivenSecret(value=value)
    for shown in (wanted, given, SecretsGiven(secrets={"hub": given}), [given]):
        assert value not in repr(shown)
    ask = Ask("i", 0.0, "p", "secret", "set", "me", encode(wanted))
    empty = Ask("i", 0.0, "p", "secret", "set", "me", b"")
    assert unvalued(ask).access("ok") == empty.access("ok")


class World:
    """The scheduler's answer and the rows of a project."""

    def __init__(self, sealer: Sealer, found: SandboxInfo | None) -> None:
        self._found = found
        self._row = Row(INFO, sealer.seal("value", project="p", name="hub"))

    async def request(self, *_: Any) -> SandboxPage:
        return SandboxPage(sandboxes=[self._found] if self._found else [])

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[None]:
        yield

    async def find(self, _: Any, project: str, names: Any) -> dict[str, Row]:
        assert project == "p"
        return {"hub": self._row} if "hub" in names else {}


def sandbox(**changes: Any) -> SandboxInfo:
    given = {
        "uid": "u" * 26, "project": "p", "state": "running", "generation": 1, "node": "n1",
        "backend": "container", "created_at": 0.0, "changed_at": 0.0, "spec": spec(), **changes,
    }  # fmt: skip
    return SandboxInfo(**given)


async def given(found: SandboxInfo | None, monkeypatch: pytest.MonkeyPatch) -> SecretsGiven:
    sealer = Sealer(key())
    world: Any = World(sealer, found)
    monkeypatch.setattr(secret_store, "find", world.find)
    door = Secrets(sealer, db=world, bus=world, clock=FakeClock())
    incoming = Incoming("dsec.rpc.v1.auth.secrets.n1", {}, "")
    return await door.given(SecretsWanted(uid="u" * 26, project="p"), incoming)


async def test_a_node_gets_values_of_its_own_sandboxes_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = await given(sandbox(), monkeypatch)
    assert found.secrets["hub"].value == "value"
    for other in (None, sandbox(node="n2"), sandbox(node=None), sandbox(state="stopped")):
        with pytest.raises(Forbidden):
            await given(other, monkeypatch)


async def test_a_node_gets_only_what_the_sandbox_is_bound_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor what may not go there any more."""
    assert (await given(sandbox(spec=SandboxSpec()), monkeypatch)).secrets == {}
    assert (await given(sandbox(spec=spec(hosts=["old.test"])), monkeypatch)).secrets == {}
