"""Tokens of an OIDC issuer, verified with a local key set."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jwt
import nats.errors
import pytest
import pytest_asyncio
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey

from devstack import Infra
from services.auth import bootstrap
from services.auth.app import App
from services.auth.oidc import principal_id
from shared import ids, migrate, topology
from tests.integration.auth.conftest import (
    MARKS,
    ROOT,
    Person,
    Stack,
    connect,
    make_settings,
    ready,
)  # fmt: skip

pytestmark = MARKS

ISSUER = "https://id.example.org"
AUDIENCE = "dsec"


@pytest.fixture(scope="module")
def key() -> RSAPrivateKey:
    return rsa.generate_private_key(65537, 2048)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def stack(
    tmp_path_factory: pytest.TempPathFactory, key: RSAPrivateKey
) -> AsyncIterator[Stack]:
    """A stack of its own: here tokens are accepted."""
    folder: Path = tmp_path_factory.mktemp("oidc")
    public = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(key.public_key()))
    keys = folder / "jwks.json"
    keys.write_text(json.dumps({"keys": [{**public, "kid": "k1", "use": "sig"}]}))
    async with Infra(folder / "stack") as endpoints:
        dsns = await migrate.prepare(endpoints.pg_dsn_admin, {"auth": "x"})
        secrets = await bootstrap.bootstrap(dsns["auth"], endpoints.account_seed)
        settings = make_settings(
            endpoints, dsns["auth"], oidc_issuer=ISSUER, oidc_audience=AUDIENCE,
            oidc_jwks=str(keys),
        )  # fmt: skip
        app = App(settings)
        await app.start()
        await topology.declare(app.bus.js)
        await ready(app)
        yield Stack(endpoints, settings, app, app.db, app.bus, secrets)
        await app.close()


def token(key: Any, *, kid: str = "k1", algorithm: str = "RS256", **changes: Any) -> str:
    claims = {
        "iss": ISSUER, "aud": AUDIENCE, "sub": "ada", "exp": time.time() + 60,
        "dsec_projects": [ROOT], **changes,
    }  # fmt: skip
    return jwt.encode(claims, key, algorithm=algorithm, headers={"kid": kid})


async def enter(stack: Stack, text: str, subject: str = "ada") -> Person:
    return await connect(stack, text, principal=principal_id(ISSUER, subject))


async def test_a_valid_token_connects_with_its_claims_grants(
    stack: Stack, key: RSAPrivateKey
) -> None:
    person = await enter(stack, token(key))
    who = await person.read(ROOT, "whoami", "get")
    assert who["principal"] == person.principal
    assert "sandbox.*" in who["grants"]
    assert ids.is_ulid(person.principal)
    await person.nc.close()


async def test_claims_are_the_grants_of_now(stack: Stack, key: RSAPrivateKey) -> None:
    first = await enter(stack, token(key, sub="bob", dsec_projects={ROOT: ["quota.get"]}), "bob")
    assert (await first.read(ROOT, "whoami", "get"))["grants"] == ["quota.get"]
    await first.nc.close()
    then = await enter(stack, token(key, sub="bob", dsec_projects={ROOT: ["key.list"]}), "bob")
    assert (await then.read(ROOT, "whoami", "get"))["grants"] == ["key.list"]
    await then.nc.close()


@pytest.mark.parametrize(
    "changes",
    [
        {"exp": 1_000_000_000},
        {"iss": "https://evil.example.org"},
        {"aud": "else"},
        {"sub": "eve", "dsec_projects": []},
        {"sub": "eve", "dsec_projects": ["nowhere"]},
        {"kid": "k2"},
    ],
)
async def test_a_token_that_is_not_right_is_refused(
    stack: Stack, key: RSAPrivateKey, changes: dict[str, Any]
) -> None:
    with pytest.raises(nats.errors.Error, match=r"(?i)authorization violation"):
        await enter(stack, token(key, **changes), changes.get("sub", "ada"))


async def test_a_token_of_another_key_or_algorithm_is_refused(stack: Stack) -> None:
    other = rsa.generate_private_key(65537, 2048)
    for text in (token(other), token("k" * 32, algorithm="HS256"), token("", algorithm="none")):
        with pytest.raises(nats.errors.Error, match=r"(?i)authorization violation"):
            await enter(stack, text)
