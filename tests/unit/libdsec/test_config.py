"""Where the SDK finds its server, key and project."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from libdsec import InvalidRequest, _ids, config

PRINCIPAL = "01k0000000000000000000peer"
KEY = f"dsec_{PRINCIPAL}_{'s' * 40}"


def test_arguments_go_before_the_environment_and_it_before_the_file(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(f'url = "nats://file:1"\napi_key = "{KEY}"\nproject = "from-file"\n')
    env = {"DSEC_CONFIG": str(path), "DSEC_PROJECT": "from-env"}
    found = config.load(url="nats://arg:1,nats://arg:2", env=env)
    assert (found.project, found.api_key, found.principal) == ("from-env", KEY, PRINCIPAL)
    assert found.servers == ["nats://arg:1", "nats://arg:2"]
    assert config.load(env={"DSEC_CONFIG": str(path)}).url == "nats://file:1"


def test_the_key_is_not_shown(tmp_path: Path) -> None:
    env = {"DSEC_API_KEY": KEY, "DSEC_PROJECT": "p", "DSEC_CONFIG": str(tmp_path / "no")}
    assert "sss" not in repr(config.load(env=env))


@pytest.mark.parametrize(
    ("env", "field"),
    [
        ({"DSEC_PROJECT": "p"}, "api_key"),
        ({"DSEC_API_KEY": KEY}, "project"),
        ({"DSEC_API_KEY": "guess", "DSEC_PROJECT": "p"}, "api_key"),
        ({"DSEC_API_KEY": "dsec_short_x", "DSEC_PROJECT": "p"}, "api_key"),
        ({"DSEC_API_KEY": KEY, "DSEC_PROJECT": "a.b"}, "project"),
    ],
)
def test_what_is_missing_or_wrong_is_named(
    env: dict[str, str], field: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        config.load(env={"DSEC_CONFIG": str(tmp_path / "no"), **env})
    assert caught.value.field == field


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text("url = \n")
    with pytest.raises(InvalidRequest, match=r"config\.toml"):
        config.load(env={"DSEC_CONFIG": str(path)})


def test_the_principal_of_a_token_is_its_issuer_and_subject() -> None:
    def token(**claims: str) -> str:
        body = base64.urlsafe_b64encode(json.dumps(claims).encode()).rstrip(b"=").decode()
        return f"e30.{body}.c2ln"

    one = _ids.principal_of(token(iss="https://issuer", sub="a"))
    assert _ids.is_ulid(one)
    assert one == _ids.principal_of(token(iss="https://issuer", sub="a"))
    assert one != _ids.principal_of(token(iss="https://issuer", sub="b"))
    with pytest.raises(InvalidRequest):
        _ids.principal_of(token(iss="only"))
