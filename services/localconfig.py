"""Secrets, environments and client files of the local system.

Owns: which variable each process gets, ``secrets.json``, ``client.env`` and
``config.toml``. Secrets travel in environments and 0600 files, never in arguments.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import secrets
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from devstack import Endpoints
from devstack.process import StartError
from shared.blobs.opening import is_remote
from shared.migrate import service_dsn

if TYPE_CHECKING:
    from services.local import LocalOptions

PASSWORD_BYTES = 24
KEY_BYTES = 32
TOOL_S = 60.0
"""Longest run of a migration or bootstrap."""
PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "DOCKER_HOST", "VIRTUAL_ENV")
"""Variables of this process that services see; all others are left out, so that a
user's ``DSEC_*`` or a stray secret does not configure them."""


@dataclass(frozen=True)
class Secrets:
    """Made once and kept: the services' database passwords, the key of kept secrets."""

    pg_passwords: dict[str, str]
    secret_key: str = ""


@dataclass(frozen=True)
class Access:
    """What bootstrap gives: the root project, the administrator's key, nodes' keys."""

    project: str
    admin_key: str
    node_keys: dict[str, str]


def load_secrets(path: Path, services: Iterable[str]) -> Secrets:
    """Reads ``path``, or makes it (mode 0600)."""
    if path.exists():
        made = Secrets(**json.loads(path.read_text()))
    else:
        made = Secrets({name: secrets.token_urlsafe(PASSWORD_BYTES) for name in services})
    if not made.secret_key:
        made = replace(made, secret_key=base64.b64encode(secrets.token_bytes(KEY_BYTES)).decode())
        write_private(path, json.dumps(asdict(made)))
    return made


def write_private(path: Path, text: str) -> None:
    """Writes a file that only its owner may read, in one step."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    os.replace(temporary, path)


def inherited() -> dict[str, str]:
    """What every process gets of this one's environment."""
    env = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    return env | {"PYTHONUNBUFFERED": "1", "MALLOC_ARENA_MAX": "2"}


@dataclass(frozen=True)
class Common:
    """What environments are made of."""

    endpoints: Endpoints
    dsns: Mapping[str, str]
    state_dir: Path
    options: LocalOptions
    secret_key: str = ""

    def _base(self) -> dict[str, str]:
        env = inherited() | {
            "DSEC_NATS_URL": self.endpoints.nats_url,
            "DSEC_LOG_LEVEL": self.options.log_level,
            "DSEC_STORE_URL": f"file://{self.state_dir / 'store'}",
        }
        if self.options.trace:
            env["DSEC_TRACE_FILE"] = str(self.state_dir / "trace.jsonl")
        return env

    def service(self, name: str) -> dict[str, str]:
        """The environment of a control-plane service."""
        env = self._base() | {
            "DSEC_NATS_USER": name,
            "DSEC_NATS_PASSWORD": self.endpoints.nats_users[name],
            "DSEC_PG_DSN": self.dsns[name],
        }
        if name == "scheduler":
            env["DSEC_REDIS_URL"] = self.endpoints.redis_url
        if name == "auth":
            env |= {
                "DSEC_AUTH_ACCOUNT_SEED": self.endpoints.account_seed,
                "DSEC_AUTH_SECRET_KEYS": self.secret_key,
                "DSEC_SYS_USER": "sys",
                "DSEC_SYS_PASSWORD": self.endpoints.nats_users["sys"],
            }
        if name == "imagesvc":
            env["DSEC_STATE_DIR"] = str(self.state_dir / "imagesvc")
            env["DSEC_IMAGE_SCRATCH"] = str(self.state_dir / "imagesvc/scratch")
            env["DSEC_IMAGE_TRANSFERS"] = str(self.state_dir / "imagesvc/transfers")
            env["DSEC_IMAGE_BUILDS"] = "true"
            env["DSEC_IMAGE_REGISTRIES"] = "*"
            env["DSEC_IMAGE_ROOTS"] = ":".join(str(root) for root in self.options.image_roots)
        return env | dict(self.options.env)

    def edge(self, node: str, key: str, drivers: Sequence[str]) -> dict[str, str]:
        """The environment of a node's edge: no database, no Redis, its own key."""
        env = self._base() | {
            "DSEC_NODE": node,
            "DSEC_NATS_TOKEN": key,
            "DSEC_DRIVERS": ",".join(drivers),
            "DSEC_STATE_DIR": str(self.state_dir / "nodes" / node),
            "DSEC_LAYERS_DIR": str(self.state_dir / "layers"),
        }
        return env | dict(self.options.env)


    @property
    def remote_store(self) -> bool:
        """Whether nodes fetch layers, by way of a layer service."""
        return is_remote((self._base() | dict(self.options.env))["DSEC_STORE_URL"])

    def layers(self) -> dict[str, str]:
        """The environment of the machine's layer service: the store and nothing else."""
        env = {k: v for k, v in self._base().items() if not k.startswith("DSEC_NATS")}
        return env | {"DSEC_LAYERS_DIR": str(self.state_dir / "layers")} | dict(self.options.env)


async def migrate(admin_dsn: str, passwords: Mapping[str, str]) -> dict[str, str]:
    """Brings every service's role and schema up to date; returns their DSNs. In a
    process of its own, whose memory is given back."""
    env = inherited() | {"DSEC_PG_ADMIN_DSN": admin_dsn}
    env |= {f"DSEC_PG_PASSWORD_{name.upper()}": value for name, value in passwords.items()}
    await _tool("migrate", ["shared.migrate"], env)
    return {name: service_dsn(admin_dsn, name, value) for name, value in passwords.items()}


async def upgrade_bus(common: Common) -> None:
    """Brings the streams of an earlier version to this one's map."""
    await _tool("topology", ["shared.topology"], common.service("scheduler"))


async def bootstrap(common: Common, nodes: Sequence[str]) -> Access:
    """Has auth make the root project, the administrator and the nodes, or tell those
    that are there."""
    out = common.state_dir / "access.json"
    argv = ["services.auth", "bootstrap", "--out", str(out)]
    for node in nodes:
        argv += ["--node", node]
    await _tool("bootstrap", argv, common.service("auth"))
    return Access(**json.loads(out.read_text()))


async def _tool(name: str, argv: Sequence[str], env: Mapping[str, str]) -> None:
    """Runs ``python -m argv`` to its end. Raises :class:`StartError` with its output."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", *argv, env=env, stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
        cwd=Path(__file__).resolve().parent.parent,
    )  # fmt: skip
    try:
        async with asyncio.timeout(TOOL_S):
            _, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise StartError(f"{name} ended with {process.returncode}: {err.decode()[-2000:]}")


def write_client_files(state_dir: Path, url: str, access: Access) -> None:
    """``client.env`` for shells, ``config.toml`` for the SDK; both 0600."""
    values = {"url": url, "api_key": access.admin_key, "project": access.project}
    env = "".join(f"export DSEC_{name.upper()}='{value}'\n" for name, value in values.items())
    toml = "".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items())
    write_private(state_dir / "client.env", env)
    write_private(state_dir / "config.toml", toml)
