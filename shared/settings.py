"""Settings from the environment, typed and checked. Owns the ``DSEC_`` names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from shared.errors import InvalidRequest

T = TypeVar("T", bound=msgspec.Struct)
PREFIX = "DSEC_"


class Common(msgspec.Struct, kw_only=True):
    """What every service takes. DSNs and passwords may also come as a file named
    by ``<NAME>_FILE`` (a mounted secret)."""

    nats_url: str = "nats://127.0.0.1:4222"
    nats_user: str | None = None
    nats_password: str | None = None
    nats_token: str | None = None
    log_level: str = "INFO"
    health_port: int = 0
    trace_file: str | None = None
    shutdown_s: float = 10.0


def load(type_: type[T], env: Mapping[str, str] | None = None) -> T:
    """``type_`` filled from ``DSEC_<FIELD>``. Raises ``InvalidRequest`` that names
    the variable at fault."""
    env = os.environ if env is None else env
    values: dict[str, Any] = {}
    for name in type_.__struct_fields__:
        key = PREFIX + name.upper()
        if key in env:
            values[name] = env[key]
        elif key + "_FILE" in env:
            values[name] = _secret(key + "_FILE", env[key + "_FILE"])
    try:
        return msgspec.convert(values, type_, strict=False)
    except msgspec.ValidationError as exc:
        message, _, path = str(exc).partition(" - at `$.")
        field = path.rstrip("`") or None
        if field is None and message.startswith("Object "):  # "missing required field `x`"
            field, message = message.split("`")[1], "is not set"
        variable = f"{PREFIX}{field.upper()}" if field else "settings"
        raise InvalidRequest(f"{variable}: {message}", field=field) from exc


def _secret(variable: str, path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().strip()
    except OSError as exc:
        raise InvalidRequest(f"{variable}: {exc.strerror}: {path}") from exc
