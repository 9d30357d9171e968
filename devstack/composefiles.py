"""Secrets and configuration for docker-compose.yml: ``python -m devstack.composefiles``.

Owns: ``deploy/run/`` (mode 0700, never in Git): one environment file a service, which
holds that service's secrets only, and the bus's configuration. Made once; a second run
keeps passwords, since the database was made with them.
"""

from __future__ import annotations

import base64
import os
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path

from devstack.credentials import Credentials, load_or_make
from devstack.nats_server import render_config

SECRET_KEYS = "DSEC_AUTH_SECRET_KEYS"
DEFAULT_FOLDER = Path("deploy/run")
SERVICES = ("auth", "scheduler", "imagesvc", "audit", "burst")
NATS_URL = "nats://nats:4222"
_DATABASE = "postgres:5432/dsec"


def write(folder: Path) -> None:
    """Make or refresh every file in ``folder``."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    credentials = load_or_make(folder / "credentials.json")
    roles = _role_passwords(folder / "migrate.env")
    key = _kept(folder / "auth.env").get(SECRET_KEYS) or _new_key()
    config = render_config(credentials, Path("/data"), port=4222, host="0.0.0.0")
    _write(folder / "nats.conf", config)
    for name, values in environments(credentials, roles, key).items():
        _write(folder / f"{name}.env", _env_text(values))
    edge = folder / "edge.env"
    if not edge.exists():  # its key comes from the running system; an operator fills it in
        _write(edge, _env_text({"DSEC_NATS_TOKEN": ""}))


def environments(
    credentials: Credentials, roles: Mapping[str, str], secret_keys: str
) -> dict[str, dict[str, str]]:
    """File name -> variables. ``roles`` are the passwords of the services' database
    roles, ``secret_keys`` those under which auth keeps secrets."""
    admin = f"postgresql://postgres:{credentials.pg_password}@{_DATABASE}"
    redis_url = f"redis://:{credentials.redis_password}@redis:6379/0"
    files = {
        "postgres": {"POSTGRES_PASSWORD": credentials.pg_password, "POSTGRES_DB": "dsec"},
        "redis": {"REDIS_PASSWORD": credentials.redis_password},
        "migrate": {"DSEC_PG_ADMIN_DSN": admin}
        | {f"DSEC_PG_PASSWORD_{name.upper()}": roles[name] for name in SERVICES},
    }
    for name in SERVICES:
        files[name] = {
            "DSEC_NATS_URL": NATS_URL,
            "DSEC_NATS_USER": name,
            "DSEC_NATS_PASSWORD": credentials.nats_passwords[name],
            "DSEC_PG_DSN": f"postgresql://dsec_{name}:{roles[name]}@{_DATABASE}",
        }
    for name in ("scheduler", "burst"):
        files[name]["DSEC_REDIS_URL"] = redis_url
    files["auth"] |= {
        "DSEC_AUTH_ACCOUNT_SEED": credentials.account_seed,
        SECRET_KEYS: secret_keys,
        "DSEC_SYS_USER": "sys",
        "DSEC_SYS_PASSWORD": credentials.nats_passwords["sys"],
    }
    return files


def _kept(file: Path) -> dict[str, str]:
    """The variables of an environment file that was written before."""
    lines = file.read_text().splitlines() if file.exists() else []
    return dict(line.split("=", 1) for line in lines)


def _new_key() -> str:
    return base64.b64encode(secrets.token_bytes(32)).decode()


def _role_passwords(migrate_env: Path) -> dict[str, str]:
    kept = _kept(migrate_env)
    return {
        name: kept.get(f"DSEC_PG_PASSWORD_{name.upper()}") or secrets.token_urlsafe(24)
        for name in SERVICES
    }


def _env_text(values: Mapping[str, str]) -> str:
    return "".join(f"{name}={value}\n" for name, value in sorted(values.items()))


def _write(path: Path, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_FOLDER)
