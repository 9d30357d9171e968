"""API keys and the auth callout's JWTs."""

from __future__ import annotations

import base64
import json

import nkeys
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nacl.signing import VerifyKey

from services.auth import natsjwt, tokens
from services.auth.asks import own_inbox
from services.auth.natsjwt import BadRequestToken, ConnectRequest, Signer, read_request
from services.auth.permissions import node
from shared import ids

SEED, PUBLIC = natsjwt.mint_seed(bytes(range(32)))


def test_a_key_is_the_same_again_and_only_its_hash_matches_it() -> None:
    root = tokens.root_secret(SEED)
    principal, key_id = ids.new(), ids.new()
    text = tokens.derive(root, principal, key_id)
    assert text == tokens.derive(root, principal, key_id)
    assert text != tokens.derive(root, principal, ids.new())
    assert text != tokens.derive(tokens.root_secret("SAOTHER"), principal, key_id)
    parsed = tokens.parse(text)
    assert parsed is not None
    assert parsed.principal == principal
    secret = text.split("_", 2)[2]
    assert len(secret) >= 32
    assert secret not in repr(parsed)
    stored = tokens.key_hash(text)
    assert tokens.matches(text, stored)
    assert not tokens.matches(text[:-1] + ("A" if text[-1] != "A" else "B"), stored)
    assert text.encode() not in stored


@given(st.text())
def test_whatever_else_is_no_key(text: str) -> None:
    assert tokens.parse(text) is None


def claims(token: str) -> dict[str, object]:
    body = token.split(".")[1]
    return dict(json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4))))


def signed_by_account(token: str) -> None:
    signed, _, signature = token.rpartition(".")
    raw = base64.b32decode(PUBLIC + "=" * (-len(PUBLIC) % 8))
    VerifyKey(raw[1:33]).verify(
        signed.encode(), base64.urlsafe_b64decode(signature + "=" * (-len(signature) % 4))
    )


def test_an_answer_wraps_a_user_for_this_server_and_connection() -> None:
    signer = Signer(SEED, account="DSEC")
    assert signer.public == PUBLIC
    request = ConnectRequest("NSERVER", "UUSER", "secret")
    assert "secret" not in repr(request)
    user = signer.user(request, node("p1", "n1"), name="p1", now=100.0, expires_at=160.9)
    answer = signer.answer(request, now=100.0, user=user).decode()
    for token in (user, answer):
        signed_by_account(token)
    outer, inner = claims(answer), claims(user)
    assert (outer["aud"], outer["sub"], outer["iss"]) == ("NSERVER", "UUSER", PUBLIC)
    assert outer["nats"]["type"] == "authorization_response"
    assert outer["nats"]["jwt"] == user
    assert (inner["aud"], inner["sub"], inner["name"], inner["exp"]) == (
        "DSEC", "UUSER", "p1", 160,
    )  # fmt: skip
    assert "dsec.hb.v1.n1" in inner["nats"]["pub"]["allow"]


def test_a_refusal_says_nothing() -> None:
    answer = Signer(SEED, account="DSEC").answer(ConnectRequest("N", "U", "t"), now=1.0)
    assert claims(answer.decode())["nats"]["error"] == natsjwt.REFUSED
    assert "jwt" not in claims(answer.decode())["nats"]


@given(st.binary(max_size=200))
def test_what_is_no_request_is_refused(data: bytes) -> None:
    with pytest.raises(BadRequestToken):
        read_request(data)
    body = base64.urlsafe_b64encode(data).rstrip(b"=")
    with pytest.raises(BadRequestToken):
        read_request(b"x." + body + b".x")


def test_a_minted_seed_is_an_accounts() -> None:
    assert SEED.startswith("SA")
    assert PUBLIC.startswith("A")
    assert nkeys.from_seed(SEED.encode()).public_key.decode() == PUBLIC


@pytest.mark.parametrize(
    ("reply_to", "principal", "good"),
    [
        ("_INBOX.me.c.1", "me", True),
        ("_INBOX.you.c.1", "me", False),
        ("_INBOX.me", "me", False),
        ("_INBOX.me.*", "me", False),
        ("_INBOX.me.>", "me", False),
        ("_INBOX.any.c", "anonymous", True),
        ("dsec.cmd.v1.sandbox.op.x", "anonymous", False),
        ("$JS.API.STREAM.DELETE.X", "anonymous", False),
        ("_INBOX.me.a b", "me", False),
        (None, "me", False),
    ],
)
def test_answers_go_to_the_askers_own_inbox(
    reply_to: str | None, principal: str, good: bool
) -> None:
    assert (own_inbox(reply_to, principal) == reply_to and reply_to is not None) == good
