"""The rendered nats-server configuration."""

from __future__ import annotations

import json
from pathlib import Path

import nkeys
import pytest

from devstack.credentials import NATS_USERS, load_or_make
from devstack.nats_server import MAX_FILE_STORE_BYTES, MAX_PAYLOAD_BYTES, render_config
from schemas.streams import STREAMS

pytestmark = pytest.mark.unit


def test_every_static_user_answers_for_itself_and_everyone_else_goes_to_the_callout(
    tmp_path: Path,
) -> None:
    credentials = load_or_make(tmp_path / "c.json")
    config = json.loads(render_config(credentials, tmp_path, port=4222))
    callout = config["authorization"]["auth_callout"]
    assert callout["auth_users"] == sorted(NATS_USERS)
    assert callout["account"] == "DSEC"
    assert callout["issuer"] == credentials.account_public
    assert [user["user"] for user in config["accounts"]["SYS"]["users"]] == ["sys"]
    assert config["system_account"] == "SYS"
    assert config["max_payload"] == MAX_PAYLOAD_BYTES == 8 << 20
    assert "http_port" not in config


def test_permissions_go_to_the_named_user_only(tmp_path: Path) -> None:
    credentials = load_or_make(tmp_path / "c.json")
    limits = {"audit": {"publish": ["dsec.audit.>"], "subscribe": ["dsec.sec.>"]}}
    config = json.loads(render_config(credentials, tmp_path, port=1, permissions=limits))
    users = {user["user"]: user for user in config["accounts"]["DSEC"]["users"]}
    assert users["audit"]["permissions"] == limits["audit"]
    assert "permissions" not in users["auth"]


def test_credentials_are_made_once_and_readable_by_their_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    first = load_or_make(path)
    assert load_or_make(path) == first
    assert path.stat().st_mode & 0o777 == 0o600
    assert first.account_public.startswith("A")
    assert nkeys.from_seed(first.account_seed.encode()).public_key.decode() == first.account_public
    assert len(set(first.nats_passwords.values())) == len(NATS_USERS)


def test_the_store_is_larger_than_all_streams_together() -> None:
    """The server reserves each stream's ``max_bytes``, so the last would be refused."""
    assert sum(stream.max_bytes for stream in STREAMS) < MAX_FILE_STORE_BYTES
