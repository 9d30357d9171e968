"""imagesvc put together: the only place that knows all its parts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from schemas.hotset import HotSetQuery
from schemas.image import BlobGet, BlobPut, ImageExport, ImageQuery, ResolveRequest
from schemas.streams import durable
from schemas.subjects import blob, rpc
from services.imagesvc import store
from services.imagesvc.accesses import Accesses
from services.imagesvc.collector import Collector
from services.imagesvc.engine import DockerEngine
from services.imagesvc.exports import Exports
from services.imagesvc.handlers import Handlers
from services.imagesvc.importer import Importer
from services.imagesvc.intake import named_hosts
from services.imagesvc.reading import ImportLimits
from services.imagesvc.registry import Registries
from services.imagesvc.settings import Settings
from services.imagesvc.snapshots import Snapshots, scrub_rules
from services.imagesvc.transfers import Transfers
from services.imagesvc.uploads import Uploads
from shared.blobs.opening import open_store
from shared.bus import Bus
from shared.consumer import BatchConsumer
from shared.db import Database
from shared.errors import Unavailable
from shared.health import Health
from shared.periodic import Periodic, portions

log = logging.getLogger(__name__)

QUEUE = "imagesvc"


class App:
    """One imagesvc. :meth:`start` returns when it works; :meth:`close` ends it."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.bus = Bus(settings, "imagesvc")
        self.db = Database(settings.pg_dsn, "imagesvc")
        self.blobs = open_store(settings, scratch=Path(settings.image_scratch))
        self.engine = _engine(settings)
        self.importer = Importer(
            self.blobs,
            engine=self.engine,
            registries=_registries(settings),
            limits=ImportLimits(
                entries_max=settings.image_entries_max,
                unpacked_bytes_max=settings.image_unpacked_bytes_max,
                collapse_bytes_max=settings.image_collapse_bytes,
                seconds_max=settings.image_import_s,
                parallel_max=settings.image_parallel,
                small_bytes=settings.image_small_bytes,
            ),
            verify=settings.image_verify,
        )
        self.collector = Collector(settings, self.bus, self.db, self.blobs)
        transfers = Path(settings.image_transfers)
        self.uploads = Uploads(
            transfers / "uploads", bytes_max=settings.image_upload_bytes_max,
            total_bytes_max=settings.image_uploads_bytes_max,
            keep_s=settings.image_transfer_keep_s,
        )  # fmt: skip
        self.handlers = Handlers(
            settings, self.bus, self.db, importer=self.importer, uploads=self.uploads,
            snapshots=Snapshots(
                self.bus, self.blobs, scrub=scrub_rules(settings.image_scrub)
            ),
            discard=self.collector.discard,
        )  # fmt: skip
        self.exports = Exports(
            self.blobs, transfers / "exports", keep_s=settings.image_transfer_keep_s,
            keep=self.handlers.lease, release=self.handlers.give_back,
            total_bytes_max=settings.image_exports_bytes_max,
        )  # fmt: skip
        self.transfers = Transfers(settings, self.db, self.uploads, self.exports)
        self.quick = BatchConsumer(self.bus, durable("imagesvc_quick"), self.handlers.commands)
        # one import each: a long one holds up no other
        self.imports = [
            BatchConsumer(self.bus, durable("imagesvc_commands"), self.handlers.commands)
            for _ in range(settings.image_commands)
        ]
        self.snapshots = [
            BatchConsumer(self.bus, durable("imagesvc_snapshots"), self.handlers.commands)
            for _ in range(settings.image_commands)
        ]
        self.accesses = Accesses(self.bus, self.db, self.blobs)
        self.traces = BatchConsumer(
            self.bus, durable("imagesvc_accesses"), self.accesses.record
        )
        self.health = Health("imagesvc")
        self.collecting = Periodic(
            "collect layers", self.collector.collect, every_s=settings.image_gc_s, at_once=False
        )
        self.pruning = Periodic("prune requests", self.prune, every_s=settings.image_prune_s)
        self._answer()

    def _answer(self) -> None:
        self.bus.answer(
            rpc("imagesvc", "resolve"), ResolveRequest, self.handlers.resolve, queue=QUEUE
        )
        self.bus.answer(rpc("imagesvc", "images"), ImageQuery, self.handlers.images, queue=QUEUE)
        self.bus.answer(rpc("imagesvc", "export"), ImageExport, self.transfers.export, queue=QUEUE)
        self.bus.answer(rpc("imagesvc", "hot_set"), HotSetQuery, self.accesses.hot_set, queue=QUEUE)
        self.bus.answer(blob("*", "put", "*"), BlobPut, self.transfers.put, queue=QUEUE)
        self.bus.answer(blob("*", "get", "*"), BlobGet, self.transfers.get, queue=QUEUE)

    async def start(self) -> None:
        """Removes what crashed imports left, connects, begins to work."""
        swept = await asyncio.to_thread(self.blobs.sweep)
        if swept:
            log.info("removed %d unfinished imports", swept)
        await self.bus.start()
        for consumer in self._consumers:
            consumer.start()
        self.pruning.start()
        self.collecting.start()
        self.health.add("bus", self.bus.check)
        self.health.add("database", self.db.ping)
        self.health.add("quick", self.quick.check)
        self.health.add("imports", self._check_imports)
        self.health.add("store", self._check_store)
        await self.health.serve(self.settings.health_port)

    async def close(self) -> None:
        """Ends; an import at hand is broken off and comes again after the next start."""
        await self.health.close()
        await self.collecting.close()
        await self.pruning.close()
        await asyncio.gather(*(c.close() for c in self._consumers))
        await self.exports.close()
        await self.bus.close()
        await asyncio.to_thread(self.importer.close)
        await self.db.close()

    @property
    def _consumers(self) -> Sequence[BatchConsumer]:
        return (self.quick, self.traces, *self.imports, *self.snapshots)

    async def _check_imports(self) -> None:
        if not self.handlers.busy:  # nothing is fetched during an import
            for consumer in (*self.imports, *self.snapshots):
                await consumer.check()

    async def _check_store(self) -> None:
        if not await asyncio.to_thread(self.blobs.ready):
            raise Unavailable(f"{self.settings.store_url} does not answer or is not writable")

    async def prune(self) -> int:
        """Forgets old requests, in small transactions, old transfers and left builds; returns
        how many requests."""
        rows, keep_s = self.settings.image_prune_rows, self.settings.image_request_keep_s
        prune = partial(store.prune_requests, keep_s=keep_s, limit=rows)
        await asyncio.to_thread(self.uploads.sweep)
        await asyncio.to_thread(self.exports.sweep)
        if self.engine is not None and self.settings.image_builds:
            await asyncio.to_thread(self.engine.sweep)
        return await portions(self.db.portion(prune), size=rows)


def _engine(settings: Settings) -> DockerEngine | None:
    if not settings.image_docker:
        return None
    return DockerEngine(
        base_url=settings.image_docker_url, build_network=settings.image_build_network,
        build_memory_bytes=settings.image_build_memory_bytes,
        scratch=Path(settings.image_transfers), registries=settings.image_registries,
        unpacked_bytes_max=settings.image_unpacked_bytes_max,
    )  # fmt: skip


def _registries(settings: Settings) -> Registries | None:
    if not settings.image_registries:
        return None
    accounts = settings.image_registry_accounts
    return Registries(
        accounts=Path(accounts) if accounts else None,
        named=named_hosts(settings.image_registries),
    )


async def main(settings: Settings, stop: asyncio.Event) -> None:
    """Runs one imagesvc until ``stop`` is set."""
    app = App(settings)
    try:
        await app.start()
        await stop.wait()
    finally:
        await app.close()
