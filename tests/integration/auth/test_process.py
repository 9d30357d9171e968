"""auth as a process: its operator's tools, its environment, its end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import sys
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from devstack import Endpoints, Infra
from devstack.process import free_port
from services.auth import bootstrap
from shared import ids, migrate, topology
from shared.bus import Bus
from shared.settings import Common
from tests.integration.auth.conftest import (
    MARKS,
    Person,
    Records,
    Stack,
    connect,
    make_settings,
)  # fmt: skip

pytestmark = MARKS

REPOSITORY = Path(__file__).parents[3]
START_S = 60.0
END_S = 60.0


@pytest_asyncio.fixture(loop_scope="session")
async def infra(tmp_path: Path) -> AsyncIterator[tuple[Endpoints, str]]:
    async with Infra(tmp_path / "stack") as endpoints:
        dsns = await migrate.prepare(endpoints.pg_dsn_admin, {"auth": "x"})
        yield endpoints, dsns["auth"]


def environment(endpoints: Endpoints, dsn: str, folder: Path, port: int) -> dict[str, str]:
    seed = folder / "seed"
    seed.write_text(endpoints.account_seed + "\n")
    return {
        "PATH": os.environ["PATH"],
        "DSEC_NATS_URL": endpoints.nats_url,
        "DSEC_NATS_USER": "auth",
        "DSEC_NATS_PASSWORD": endpoints.nats_users["auth"],
        "DSEC_PG_DSN": dsn,
        "DSEC_AUTH_ACCOUNT_SEED_FILE": str(seed),
        "DSEC_SYS_USER": "sys",
        "DSEC_SYS_PASSWORD": endpoints.nats_users["sys"],
        "DSEC_HEALTH_PORT": str(port),
    }


async def run(env: dict[str, str], *argv: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.auth", *argv, env=env, cwd=REPOSITORY,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip


async def healthy(port: int) -> dict[str, Any]:
    def ask() -> dict[str, Any] | None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as reply:
                return dict(json.load(reply))
        except OSError:
            return None

    async with asyncio.timeout(START_S):
        while (report := await asyncio.to_thread(ask)) is None:
            await asyncio.sleep(0.1)
    return report


async def test_bootstrap_can_be_repeated_and_tells_only_a_file(
    infra: tuple[Endpoints, str], tmp_path: Path
) -> None:
    env = environment(*infra, tmp_path, 0)
    out = tmp_path / "secrets.json"
    told = []
    for nodes in (("n1",), ("n1", "n2"), ("n1", "n2")):
        options = [o for n in nodes for o in ("--node", n)]
        process = await run(env, "bootstrap", *options, "--out", str(out))
        output, errors = await process.communicate()
        assert process.returncode == 0, errors
        told.append(json.loads(out.read_text()))
        for secret in (told[-1]["admin_key"], *told[-1]["node_keys"].values()):
            assert secret.encode() not in output + errors
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    assert told[0]["admin_key"] == told[1]["admin_key"]
    assert told[1] == told[2]
    assert sorted(told[2]["node_keys"]) == ["n1", "n2"]
    process = await run(env, "bootstrap", "--project", "other", "--out", str(out))
    _, errors = await process.communicate()
    assert process.returncode == 1
    assert b"root project is root" in errors


async def test_mint_nkey_makes_a_seed_once(tmp_path: Path) -> None:
    out = tmp_path / "seed"
    process = await run({"PATH": os.environ["PATH"]}, "mint-nkey", "--out", str(out))
    public, _ = await process.communicate()
    assert public.startswith(b"A")
    assert out.read_text().startswith("SA")
    assert stat.S_IMODE(out.stat().st_mode) == 0o600


async def test_a_missing_setting_is_named(tmp_path: Path) -> None:
    process = await run({"PATH": os.environ["PATH"]})
    _, errors = await process.communicate()
    assert process.returncode == 1
    assert b"DSEC_PG_DSN" in errors


async def test_it_serves_and_ends_without_losing_records(
    infra: tuple[Endpoints, str], tmp_path: Path
) -> None:
    endpoints, dsn = infra
    secrets = await bootstrap.bootstrap(dsn, endpoints.account_seed)
    helper = Bus(
        Common(nats_url=endpoints.nats_url, nats_user="scheduler",
               nats_password=endpoints.nats_users["scheduler"]),
        "test",
    )  # fmt: skip
    await helper.start()
    await topology.declare(helper.js)
    records = Records()
    await records.on(helper.client)
    port = free_port()
    process = await run(environment(endpoints, dsn, tmp_path, port))
    try:
        report = await healthy(port)
        assert set(report["checks"].values()) == {"ok"}
        settings = make_settings(endpoints, dsn)
        stack = Stack(endpoints, settings, None, None, helper, secrets)  # type: ignore[arg-type]
        admin: Person = await connect(stack, secrets.admin_key)
        made = await admin.change("root", "project", "create", name="x", id="x")
        assert made["project"]["path"] == ["root", "x"]
        for _ in range(20):
            await admin.read("root", "whoami", "get")
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(END_S):
            _, errors = await process.communicate()
        assert process.returncode == 0, errors
        assert secrets.admin_key.split("_", 2)[2].encode() not in errors
        assert endpoints.account_seed.encode() not in errors
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    wanted = {"whoami.get": 20, "project.create": 1}
    async with asyncio.timeout(END_S):
        while not (told := Counter(r["verb"] for r in records.all)) >= Counter(wanted):
            await asyncio.sleep(0.05)
    assert {verb: told[verb] for verb in wanted} == wanted
    await admin.nc.close()
    await helper.close()


@pytest.mark.slow  # what the killed process held comes again after its ack_wait
async def test_killed_and_started_again_it_charges_nothing_twice(
    infra: tuple[Endpoints, str], tmp_path: Path
) -> None:
    endpoints, dsn = infra
    secrets = await bootstrap.bootstrap(dsn, endpoints.account_seed)
    port = free_port()
    env = environment(endpoints, dsn, tmp_path, port)
    helper = Bus(
        Common(nats_url=endpoints.nats_url, nats_user="scheduler",
               nats_password=endpoints.nats_users["scheduler"]),
        "test",
    )  # fmt: skip
    await helper.start()
    await topology.declare(helper.js)
    uids: list[str] = []

    async def hear(message: Any) -> None:
        for command in json.loads(message.data)["commands"]:
            uids.extend(i[0] for i in command["items"] if len(i) < 4 or i[3] is None)

    await helper.client.subscribe("dsec.cmd.v1.sandbox.create.*", cb=hear)
    await helper.client.flush()
    process = await run(env)
    await healthy(port)
    requests = [
        {"request_id": ids.new(), "specs": [{"backend": "fake"}], "count": 5} for _ in range(300)
    ]
    for number, request in enumerate(requests):
        await helper.client.request(
            "dsec.req.v1.root.sandbox.create", json.dumps(request).encode(), timeout=START_S
        )
        if number in (100, 200):
            process.kill()
            await process.wait()
            process = await run(env)
    try:
        expected = {ids.item_uid(r["request_id"], i) for r in requests for i in range(5)}
        async with asyncio.timeout(180):
            while not expected <= set(uids):
                await asyncio.sleep(0.1)
        assert set(uids) == expected
        settings = make_settings(endpoints, dsn)
        stack = Stack(endpoints, settings, None, None, helper, secrets)  # type: ignore[arg-type]
        admin = await connect(stack, secrets.admin_key)
        quota = (await admin.read("root", "quota", "get"))["quota"]
        assert quota["used"]["sandboxes"] == len(expected)
        await admin.nc.close()
    finally:
        process.terminate()
        await process.wait()
        await helper.close()


async def test_after_a_change_of_the_seed_bootstrap_makes_keys_that_work(
    infra: tuple[Endpoints, str],
) -> None:
    endpoints, dsn = infra
    first = await bootstrap.bootstrap(dsn, endpoints.account_seed)
    seed, _ = bootstrap.mint()
    other, again = [await bootstrap.bootstrap(dsn, seed) for _ in range(2)]
    assert other.admin_key == again.admin_key
    assert other.admin_key.split("_")[1] != first.admin_key.split("_")[1]
    both = await asyncio.gather(*(bootstrap.bootstrap(dsn, seed, nodes=["n5"]) for _ in "ab"))
    assert both[0] == both[1]
