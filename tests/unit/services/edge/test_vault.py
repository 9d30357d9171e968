"""When an edge asks for secrets, and what counts while nobody answers."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from schemas.secret import GivenSecret, SecretsGiven
from services.edge.link import Link
from services.edge.vault import FRESH_S, KEPT_S, Vault
from shared.clock import FakeClock
from shared.errors import DsecError, Forbidden, Unavailable

UID, PROJECT = "0" * 26, "team"


class Auth:
    """What auth says; ``value`` may be an error."""

    def __init__(self) -> None:
        self.value: str | DsecError = "first"
        self.asked: list[str] = []

    @property
    def bus(self) -> Any:
        return self

    async def request(self, subject: str, *_: Any, **__: Any) -> SecretsGiven:
        self.asked.append(subject)
        await asyncio.sleep(0)
        if isinstance(self.value, DsecError):
            raise self.value
        return SecretsGiven(secrets={"hub": GivenSecret(value=self.value)})


class Field:
    def __init__(self) -> None:
        self.auth, self.clock = Auth(), FakeClock()
        self.vault = Vault(node="n1", link=cast("Link", self.auth), clock=self.clock)

    async def value(self) -> str:
        return (await self.vault(PROJECT, UID))["hub"].value


@pytest.fixture
def field() -> Field:
    return Field()


async def test_many_requests_ask_once_and_a_new_value_is_used_soon(field: Field) -> None:
    assert await asyncio.gather(*(field.value() for _ in range(20))) == ["first"] * 20
    assert field.auth.asked == ["dsec.rpc.v1.auth.secrets.n1"]
    field.auth.value = "second"
    assert await field.value() == "first"
    field.clock.advance(FRESH_S)
    assert await field.value() == "second"


async def test_kept_values_serve_while_auth_is_away(field: Field) -> None:
    await field.value()
    field.auth.value = Unavailable("away")
    field.clock.advance(KEPT_S - 1)
    assert await field.value() == "first"
    field.clock.advance(2)
    with pytest.raises(Unavailable):
        await field.value()


async def test_what_auth_refuses_is_kept_no_longer(field: Field) -> None:
    await field.value()
    field.clock.advance(FRESH_S)
    for refusal in (Forbidden("not this node's"), Unavailable("away")):
        field.auth.value = refusal
        with pytest.raises(type(refusal)):
            await field.value()


async def test_who_leaves_while_it_is_asked_takes_nothing_from_others(field: Field) -> None:
    first, second = (asyncio.ensure_future(field.value()) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    assert await second == "first" and len(field.auth.asked) == 1
