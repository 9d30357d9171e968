"""image: from nothing on the node to the first ``python3 -c 'print(1)'`` in an image.

The layers are in a store with 5 ms latency, the node's cache is empty, the container driver
has warm shells and the layer service is at rest. Timed from asking for the layers to the command's
end. Beside it, in turns: fetching the whole image from the same store first (16 requests of 4 MiB
at a time) and then the same, once unverified (``full_fetch_s``) and once with what we do, each
chunk checked by its digest before anything runs (``full_verified_s``); and once each ``docker
load`` + ``docker run`` of the same files from a local archive, and ``docker pull`` + ``docker
run`` from a registry with the store's latency (:mod:`bench.docker_images`). Our import (checked
through the kernel, entry by entry) and ``docker load`` read the same archive. Warm is the second
sandbox of the image; profiled is a cold node that only kept the access profile. Creates are timed
without a command: of a layer that is read on demand and of the same one in a local folder, in
turns.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from bench import docker_images, snapshots
from bench.images import rootfs
from services.edge.drivers.base import ExecSpec, Exited, Layer, StartSpec
from services.edge.drivers.container import ContainerDriver, ContainerSettings
from services.edge.layers.client import LayerService
from services.edge.layers.profiles import NAME as PROFILE
from services.imagesvc.importer import Importer, ImportResult
from services.imagesvc.sources import ImportRequest, PathSource
from shared.blobs.base import Content, LayerReader
from shared.blobs.folder import FolderStore
from shared.blobs.layout import (
    CHUNK_DIGEST_BYTES,
    CHUNKS_NAME,
    DATA_CHUNK_BYTES,
    DATA_NAME,
    META_NAME,
)
from shared.blobs.opening import StoreSettings, open_store

LATENCY_MS = 5.0
ROUNDS, QUICK_ROUNDS = 5, 2
CREATES, QUICK_CREATES = 20, 6
COMMAND = ("python3", "-c", "print(1)")
FULL_PIECE_BYTES, FULL_AT_ONCE = 4 * 1024 * 1024, 16
FILL_S = 3.0
REST_S = 0.3
"""Until a layer service that was just started has met its store: it runs long before an image
is wanted."""
REFILL_S = 0.4
"""Between two creates: the shell that one took is being replaced."""


class _Output:
    """Keeps what a command says."""

    def __init__(self) -> None:
        self.stdout = b""

    async def output(self, stream: object, data: bytes) -> None:
        self.stdout += data

    async def input(self) -> AsyncIterator[bytes]:
        for chunk in ():
            yield chunk

    def control_to(self, take: object) -> None:
        """No signal comes."""


@asynccontextmanager
async def _driver(folder: Path) -> AsyncIterator[ContainerDriver]:
    driver = ContainerDriver(
        ContainerSettings(
            node="bench-" + secrets.token_hex(3), state_dir=folder, pool_size=4, idle_layers=0
        )
    )

    async def gone(_: Exited) -> None: ...

    await driver.open(gone)
    try:
        await asyncio.sleep(FILL_S)
        yield driver
    finally:
        await driver.close()


@contextmanager
def _process(*argv: str, env: dict[str, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-m", *argv], env={**os.environ, **(env or {})}, stdout=subprocess.PIPE
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


async def _first(driver: ContainerDriver, layers: Sequence[Layer]) -> Any:
    """A sandbox that has run the command."""
    uid = "b" + secrets.token_hex(6)
    handle = await driver.start(StartSpec(uid=uid, project="bench", layers=layers))
    output = _Output()
    outcome = await driver.exec(handle, ExecSpec(op_id=uid, argv=COMMAND), output)
    if outcome.exit_code != 0 or output.stdout != b"1\n":
        raise RuntimeError(f"{COMMAND}: {outcome} {output.stdout!r}")
    return handle


async def _lazily(driver: ContainerDriver, service: LayerService, digests: list[str]) -> float:
    began = time.perf_counter()
    layers = await asyncio.to_thread(service.prepare, digests)
    handle = await _first(driver, layers)
    took = time.perf_counter() - began
    await driver.stop(handle)
    return took


async def _round(
    driver: ContainerDriver, env: dict[str, str], digests: list[str]
) -> dict[str, Any]:
    """Cold, warm and profiled; the service's counters after the cold one."""
    folder = Path(env["DSEC_LAYERS_DIR"])
    shutil.rmtree(folder, ignore_errors=True)
    figures: dict[str, Any] = {}
    with _process("services.edge.layers", env=env):
        service = LayerService(folder)
        service.stats()
        await asyncio.sleep(REST_S)
        figures["first"] = await _lazily(driver, service, digests)
        figures |= service.stats()
        figures["warm"] = await _lazily(driver, service, digests)
        await asyncio.sleep(0.5)  # the profile is written when the last sandbox is gone
        service.close()
    for chunk in (folder / "cache").glob("*/*"):
        if chunk.name.isdigit():
            chunk.unlink()
    figures["profiles"] = len(list((folder / "cache").glob(f"*/{PROFILE}")))
    with _process("services.edge.layers", env=env):
        service = LayerService(folder)
        service.stats()
        await asyncio.sleep(REST_S)
        figures["profiled"] = await _lazily(driver, service, digests)
        service.close()
    return figures


async def _creates(
    driver: ContainerDriver, env: dict[str, str], store: FolderStore, digests: list[str], count: int
) -> tuple[list[float], list[float]]:
    """Seconds of creates with the layers read on demand, which are warm, and local ones."""
    paths = [(digest, store.paths(digest)) for digest in digests]
    local = [Layer(d, str(p.meta), str(p.data) if p.data else None, "") for d, p in paths]
    samples: tuple[list[float], list[float]] = ([], [])
    with _process("services.edge.layers", env=env):
        service = LayerService(Path(env["DSEC_LAYERS_DIR"]))
        remote = await asyncio.to_thread(service.prepare, digests)
        await driver.stop(await _first(driver, remote))
        await driver.stop(await _first(driver, local))
        for _ in range(count):
            for layers, into in zip((remote, local), samples, strict=True):
                await asyncio.sleep(REFILL_S)
                uid = "b" + secrets.token_hex(6)
                began = time.perf_counter()
                handle = await driver.start(StartSpec(uid=uid, project="bench", layers=layers))
                into.append(time.perf_counter() - began)
                await driver.stop(handle)
        service.close()
    return samples


async def _fully(
    driver: ContainerDriver, reader: LayerReader, made: ImportResult, folder: Path, *,
    digests: Callable[[str], bytes] | None = None,
) -> float:  # fmt: skip
    """The whole image fetched first, then the same command. ``digests``: of a layer's chunks,
    where they are to be checked."""
    shutil.rmtree(folder, ignore_errors=True)
    began = time.perf_counter()
    layers = []
    slots = asyncio.Semaphore(FULL_AT_ONCE)

    async def piece(digest: str, name: str, start: int, path: Path) -> None:
        async with slots:
            data = await reader.fetch(digest, name, start, FULL_PIECE_BYTES)
        listed = digests(digest) if digests and name == DATA_NAME else None
        await asyncio.to_thread(_write, path, start, data, listed)

    async with asyncio.TaskGroup() as group:
        for layer in made.stored:
            place = folder / layer.digest
            place.mkdir(parents=True)
            sizes = {META_NAME: layer.meta_bytes, DATA_NAME: layer.data_bytes}
            for name, size in sizes.items():
                (place / name).touch()
                for start in range(0, size, FULL_PIECE_BYTES):
                    group.create_task(piece(layer.digest, name, start, place / name))
            data = str(place / DATA_NAME) if layer.data_bytes else None
            layers.append(Layer(layer.digest, str(place / META_NAME), data, "full"))
    handle = await _first(driver, layers)
    took = time.perf_counter() - began
    await driver.stop(handle)
    return took


def _write(path: Path, start: int, data: Content, listed: bytes | None) -> None:
    if listed is not None:
        found = b"".join(
            hashlib.sha256(data[at : at + DATA_CHUNK_BYTES]).digest()
            for at in range(0, len(data), DATA_CHUNK_BYTES)
        )
        at = start // DATA_CHUNK_BYTES * CHUNK_DIGEST_BYTES
        if found != listed[at : at + len(found)]:
            raise RuntimeError(f"{path} is damaged at {start}")
    with path.open("r+b") as file:
        file.seek(start)
        file.write(data)


def _imported(store: FolderStore, source: Path) -> tuple[ImportResult, float]:
    importer = Importer(store)
    began = time.perf_counter()
    try:
        return importer.run_blocking(ImportRequest(PathSource(source))), time.perf_counter() - began
    finally:
        importer.close()


async def run(*, quick: bool) -> dict[str, Any]:
    """Figures: first_exec_s full_fetch_s ratio_full fetched_share write_saving import_mb_s
    and their kin, those of :mod:`bench.snapshots`. Seconds are medians."""
    tree = rootfs()
    rounds: list[dict[str, Any]] = []
    full: list[float] = []
    verified: list[float] = []
    with tempfile.TemporaryDirectory(prefix="dsec-bench-") as name:
        work = Path(name)
        local = FolderStore(work / "store")
        made, import_s = await asyncio.to_thread(_imported, local, tree)

        @cache
        def listed(digest: str) -> bytes:
            with local.open(digest, CHUNKS_NAME) as file:
                return file.read()

        with _process("bench.slowstore", str(work / "store"), str(LATENCY_MS)) as store:
            assert store.stdout is not None
            url = {
                "store_url": "s3://bench", "store_key_id": "bench", "store_secret": "bench",
                "store_endpoint": f"http://127.0.0.1:{int(store.stdout.readline())}",
            }  # fmt: skip
            env = {f"DSEC_{key.upper()}": value for key, value in url.items()}
            env["DSEC_LAYERS_DIR"] = str(work / "layers")
            reader = open_store(StoreSettings(**url))  # type: ignore[arg-type]
            async with _driver(work / "driver") as driver:
                for _ in range(QUICK_ROUNDS if quick else ROUNDS):
                    rounds.append(await _round(driver, env, made.layers))
                    full.append(await _fully(driver, reader, made, work / "full"))
                    verified.append(
                        await _fully(driver, reader, made, work / "full", digests=listed)
                    )
                created = await _creates(
                    driver, env, local, made.layers,
                    QUICK_CREATES if quick else CREATES,
                )  # fmt: skip
        figures = _figures(rounds, full, made) | {
            "full_verified_s": round(median(verified), 3),
            "ratio_verified": round(
                median(verified) / median(one["first"] for one in rounds), 1
            ),
            "import_tree_mb_s": round(made.size_bytes / import_s / 1e6, 1),
            "create_on_demand_ms": round(median(created[0]) * 1e3, 1),
            "create_local_ms": round(median(created[1]) * 1e3, 1),
        }
        figures |= await asyncio.to_thread(_docker, tree, work, figures)
    return figures | await snapshots.run(quick=quick)


def _docker(tree: Path, work: Path, ours: dict[str, Any]) -> dict[str, Any]:
    """Docker's figures of the same image, and our import of the same archive."""
    archive = work / "image.tar"
    docker_images.saved(tree, archive)
    _, import_s = _imported(FolderStore(work / "beside"), archive)
    loaded = docker_images.loaded(archive, COMMAND)
    size = archive.stat().st_size
    archive.unlink()
    pull_s = docker_images.pulled(tree, work, COMMAND, delay_s=LATENCY_MS / 1e3)
    return {
        "write_saving": round(1 - ours["written_mb"] * 1e6 / loaded.image_bytes, 4),
        "docker_load_run_s": round(loaded.load_run_s, 3),
        "ratio_docker": round(loaded.load_run_s / ours["first_exec_s"], 1),
        "docker_pull_run_s": round(pull_s, 3),
        "ratio_docker_pull": round(pull_s / ours["first_exec_s"], 1),
        "import_mb_s": round(size / import_s / 1e6, 1),
        "docker_load_mb_s": round(size / loaded.load_s / 1e6, 1),
    }


def _figures(
    rounds: list[dict[str, Any]], full: list[float], made: ImportResult
) -> dict[str, Any]:
    first = median(one["first"] for one in rounds)
    meta = sum(layer.meta_bytes for layer in made.stored)
    fetched = median(one["fetched_bytes"] for one in rounds) + meta
    written = median(one["cache_bytes"] for one in rounds)
    return {
        "first_exec_s": round(first, 3),
        "profiled_exec_s": round(median(one["profiled"] for one in rounds), 3),
        "warm_exec_s": round(median(one["warm"] for one in rounds), 3),
        "full_fetch_s": round(median(full), 3),
        "ratio_full": round(median(full) / first, 1),
        "fetched_share": round(fetched / made.size_bytes, 4),
        "written_mb": round(written / 1e6, 1),
        "image_mb": round(made.size_bytes / 1e6, 1),
        "count": len(rounds),
    }
