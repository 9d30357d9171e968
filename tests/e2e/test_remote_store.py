"""The whole system with its layers in S3: lazy, right, and alive through failures."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import nats
import pytest
import pytest_asyncio

from libdsec import DSecClient, DSecContainerRunArgs, Sandbox
from libdsec.errors import CapacityExhausted, DSecError
from schemas.audit import Violations
from schemas.base import decode
from services.edge.layers.client import LayerService
from services.local import LocalOptions, LocalSystem
from tests.e2e.conftest import UNMOVED, open_client, until
from tests.integration.container.images import busybox_tree
from tests.s3server import S3Server, s3_server

pytestmark = [pytest.mark.docker, pytest.mark.slow]

MIB = 1 << 20
FILES, FILE_BYTES = 24, 2 * MIB
ARGS = DSecContainerRunArgs(container_image="lazy", ttl_running_stop=300, init_user="root")


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def system(
    s3: S3Server, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[LocalSystem]:
    tree = busybox_tree(tmp_path_factory.mktemp("image"))
    for number in range(FILES):
        (tree / f"var/f{number:02}").write_bytes(os.urandom(FILE_BYTES))
    env = {f"DSEC_{k.upper()}": v for k, v in s3.settings("e2e").items()}
    options = LocalOptions(
        state_dir=tmp_path_factory.mktemp("remote"), image_roots=[tree],
        env=env | {
            "DSEC_LAYERS_READ_DEADLINE_S": "5", "DSEC_CONTAINER_POOL_SIZE": "2", **UNMOVED,
        },
    )  # fmt: skip
    async with LocalSystem(options) as made:
        async with open_client(made) as client:
            await client.images.create("lazy", path=str(tree))
        yield made


@pytest_asyncio.fixture(loop_scope="session")
async def lazy(system: LocalSystem) -> AsyncIterator[DSecClient]:
    async with open_client(system) as client:
        yield client


def stats(system: LocalSystem) -> dict[str, int]:
    return LayerService(system.state_dir / "layers").stats()


async def start(client: DSecClient) -> Sandbox | None:
    try:
        return await client.run_container(ARGS)
    except CapacityExhausted:
        return None


async def test_a_sandbox_reads_what_it_needs_and_no_more(
    system: LocalSystem, lazy: DSecClient
) -> None:
    sandbox = await until(lambda: start(lazy), what="a node is ready")
    result = await sandbox.exec("sha256sum", "/var/f07")
    assert result.exit_code == 0
    assert 0 < stats(system)["fetched_bytes"] < FILES * FILE_BYTES * 0.15


    async def told() -> dict[str, float] | None:  # what is read ahead may still come
        metrics = await sandbox.metrics()
        return metrics if metrics["image_fetched_bytes"] == stats(system)["fetched_bytes"] else None

    metrics = await until(told, what="the same count")
    assert (metrics["execs"], metrics["net_rx_bytes"], metrics["net_tx_bytes"]) == (1, 0, 0)
    assert (await sandbox.exec("sh", "-c", "echo x >> /var/f01 && ls /var | wc -l")).text == "24\n"
    await sandbox.stop()


async def test_a_snapshot_goes_through_the_store_to_whichever_node(
    system: LocalSystem, lazy: DSecClient, s3: S3Server
) -> None:
    """The edge that restores has only what the store has: its own copy is gone."""
    sandbox = await until(lambda: start(lazy), what="a node is ready")
    made = "head -c 3000000 /dev/urandom > /var/made && rm /var/f02 && sha256sum /var/made"
    digest = (await sandbox.exec("sh", "-c", made, check=True)).text
    snapshot = await sandbox.snapshot()
    await sandbox.stop()

    async def let_go() -> bool:
        return not list((system.state_dir / "nodes").glob("*/drivers/container/captures/*"))

    await until(let_go, what="the edge keeps no copy")
    restored = await lazy.restore(snapshot)
    text = (await restored.exec("sh", "-c", "sha256sum /var/made; ls /var/f02")).text
    assert text == digest
    await restored.stop()


async def test_sandboxes_live_through_restarts_of_edge_and_layer_service(
    system: LocalSystem, lazy: DSecClient
) -> None:
    """(I13)"""
    sandbox = await until(lambda: start(lazy), what="a node is ready")
    command = "for i in 08 09 10 11 12 13; do cat /var/f$i || exit 1; sleep 0.3; done | wc -c"
    reading = asyncio.create_task(sandbox.exec("sh", "-c", command))
    await asyncio.sleep(0.3)
    os.kill(stats(system)["pid"], signal.SIGKILL)  # the worker
    result = await reading
    assert (result.exit_code, result.text.strip()) == (0, str(6 * FILE_BYTES))
    await system.restart("layers")
    await system.kill(next(name for name in system.services if name.startswith("edge")))
    await system.restart(next(name for name in system.services if name.startswith("edge")))
    result = await sandbox.exec("sh", "-c", "cat /var/f14 /var/f15 | wc -c")
    assert result.text.strip() == str(2 * FILE_BYTES)
    other = await until(lambda: start(lazy), what="a node is ready")
    assert (await other.exec("wc", "-c", "/var/f16")).exit_code == 0
    for one in (sandbox, other):
        await one.stop()

    async def only_what_the_edge_keeps() -> bool:
        return stats(system)["open"] <= 1

    await until(only_what_the_edge_keeps)


async def test_a_damaged_chunk_is_an_error_in_the_sandbox_and_an_event(
    system: LocalSystem, lazy: DSecClient, s3: S3Server
) -> None:
    """(I11)"""
    image = await lazy.images.get("lazy")
    digest = image.layers[0].digest
    key = f"e2e/layers/{digest}/data.blob"
    whole = s3.get(key)
    ends = system.infra.endpoints
    audit = await nats.connect(ends.nats_url, user="audit", password=ends.nats_users["audit"])
    told = await audit.subscribe("dsec.sec.v1.layers.observed.*")
    await audit.flush()
    sandbox = await until(lambda: start(lazy), what="a node is ready")
    await sandbox.exec("cat /dev/null", check=True)  # the tools themselves are read now
    try:
        blob = bytearray(whole)
        for at in range(0, len(blob), 4096):
            blob[at] ^= 0xFF
        s3.put(key, bytes(blob))
        result = await sandbox.exec("cat /var/f* > /dev/null")  # what was read before is cached
        assert result.exit_code == 1 and os.strerror(errno.EIO).encode() in result.stderr
        message = decode((await told.next_msg(60)).data, Violations)
        assert (message.violations[0].rule, message.violations[0].subject) == (
            "layer_damaged", digest,
        )  # fmt: skip
        assert (await sandbox.exec("true")).exit_code == 0
    finally:
        s3.put(key, whole)
        await audit.close()
    assert (await sandbox.exec("cat /var/f* > /dev/null")).exit_code == 0
    await sandbox.stop()


async def test_an_image_that_is_gone_from_the_store_fails_by_its_name(
    system: LocalSystem, lazy: DSecClient, s3: S3Server
) -> None:
    """(L07)"""
    folder = Path(str(system.options.image_roots[0])) / "root"
    (folder / "x").write_text("x")
    image: Any = await lazy.images.create("gone", path=str(folder), kind="toolkit")
    digest = image.layers[0].digest
    for name in ("manifest.json", "meta.erofs"):
        s3.delete(f"e2e/layers/{digest}/{name}")
    with pytest.raises(DSecError, match=digest):
        await lazy.run_container(DSecContainerRunArgs(layers=["lazy", "gone"]))
