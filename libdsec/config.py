"""Where the SDK finds its server, key and project.

Owns: the order (arguments, environment, file) and its errors. The file is TOML
with ``url``, ``api_key``, ``project``, at ``DSEC_CONFIG`` or
``~/.config/dsec/config.toml``.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from libdsec import _ids
from libdsec.errors import InvalidRequest

DEFAULT_URL = "nats://127.0.0.1:4222"
KEYS = ("url", "api_key", "project")


@dataclass(frozen=True, slots=True)
class Config:
    """Everything a connection needs. ``principal`` is read out of the key."""

    url: str
    project: str
    principal: str
    api_key: str = field(repr=False)

    @property
    def servers(self) -> list[str]:
        """The servers of ``url``, which may name several, separated by commas."""
        return [part.strip() for part in self.url.split(",") if part.strip()]


def config_path(env: Mapping[str, str]) -> Path:
    """The file that is read."""
    given = env.get("DSEC_CONFIG")
    if given:
        return Path(given)
    base = env.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "dsec" / "config.toml"


def read_file(env: Mapping[str, str]) -> dict[str, str]:
    """The file's values; empty where there is none. Raises ``InvalidRequest`` for
    one that is not TOML or cannot be read."""
    path = config_path(env)
    try:
        found = tomllib.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as exc:
        raise InvalidRequest(f"{path}: {exc}", field="config") from exc
    return {key: str(found[key]) for key in KEYS if key in found}


def load(
    *,
    url: str | None = None,
    api_key: str | None = None,
    project: str | None = None,
    env: Mapping[str, str] | None = None,
) -> Config:
    """The configuration. Raises ``InvalidRequest`` naming what is missing."""
    env = os.environ if env is None else env
    given = {"url": url, "api_key": api_key, "project": project}
    values = {k: v or env.get(f"DSEC_{k.upper()}") for k, v in given.items()}
    if not all(values.values()):
        stored = read_file(env)
        values = {k: v or stored.get(k) for k, v in values.items()}
    for key in ("api_key", "project"):
        if not values[key]:
            text = f"no {key}: pass it, set DSEC_{key.upper()} or write it to {config_path(env)}"
            raise InvalidRequest(text, field=key)
    key, name = str(values["api_key"]).strip(), str(values["project"])
    if not _ids.is_token(name):
        raise InvalidRequest(f"{name!r} cannot be a project's id", field="project")
    return Config(
        url=values["url"] or DEFAULT_URL,
        project=name,
        principal=_ids.principal_of(key),
        api_key=key,
    )
