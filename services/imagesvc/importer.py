"""An image, workspace or toolkit from its source into the store.

Owns: the order of things: recognise the source, read its layers, collapse them,
place them, write, check and store them; limits, progress, cancellation. Does not
own: names and who may import what.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from schemas.sandbox import ImageConfig
from services.imagesvc.collecting import searched_rarely
from services.imagesvc.meter import Cancelled, ImportProgress, Meter
from services.imagesvc.reading import ImageEngine, ImageRegistries, ImportLimits, Reading
from services.imagesvc.sources import ImportRequest, is_small
from services.imagesvc.spool import Spool
from services.imagesvc.startup import read_first
from shared.blobs.base import BlobStore
from shared.blobs.folder import FolderStore
from shared.blobs.layout import LayerFiles, LayerManifest
from shared.erofs.layertree import Inode, stored_bytes
from shared.erofs.writer import build_layer
from shared.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class ImportResult:
    """``stored``: what the store holds, bottom first."""

    stored: list[LayerManifest]
    config: ImageConfig

    @property
    def layers(self) -> list[str]:
        """Digests, bottom first."""
        return [layer.digest for layer in self.stored]

    @property
    def size_bytes(self) -> int:
        return sum(layer.size_bytes for layer in self.stored)


class Importer:
    """Imports into ``store``; ``engine`` serves local images and builds, ``registries``
    images of registries."""

    def __init__(
        self,
        store: BlobStore,
        *,
        engine: ImageEngine | None = None,
        registries: ImageRegistries | None = None,
        limits: ImportLimits | None = None,
        verify: bool = True,
    ) -> None:
        self._store = store
        self._engine = engine
        self._registries = registries
        self._limits = limits or ImportLimits()
        self._verify = verify
        self._pool = ThreadPoolExecutor(self._limits.parallel_max, thread_name_prefix="import")
        self._small = ThreadPoolExecutor(1, thread_name_prefix="small import")

    async def run(
        self, request: ImportRequest, *, progress: Callable[[ImportProgress], None] | None = None,
        keep: Callable[[Sequence[LayerFiles]], Awaitable[None]] | None = None,
    ) -> ImportResult:  # fmt: skip
        """As :meth:`run_blocking`, in a thread; ``progress`` and ``keep`` run on the event loop.

        When cancelled the thread stops at its next step and cleans up after itself.
        """
        loop = asyncio.get_running_loop()
        cancelled = threading.Event()

        def report(state: ImportProgress) -> None:
            if cancelled.is_set():
                raise Cancelled
            if progress is not None:
                loop.call_soon_threadsafe(progress, state)

        def kept(files: Sequence[LayerFiles]) -> None:
            async def wait() -> None:
                if keep is not None:
                    await keep(files)

            asyncio.run_coroutine_threadsafe(wait(), loop).result()

        small = await asyncio.to_thread(is_small, request.source, self._limits.small_bytes)
        pool = self._small if small else self._pool
        blocking = partial(
            self.run_blocking, request, progress=report, keep=kept, cancelled=cancelled.is_set
        )
        work = loop.run_in_executor(pool, blocking)
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            cancelled.set()
            await asyncio.gather(work, return_exceptions=True)
            raise

    def run_blocking(
        self,
        request: ImportRequest,
        *,
        progress: Callable[[ImportProgress], None] | None = None,
        keep: Callable[[Sequence[LayerFiles]], None] = lambda files: None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> ImportResult:
        """Import and return what was stored. ``keep`` is told of the finished layers
        before the first is stored, so that collection leaves them alone.

        Raises :class:`InvalidRequest`, ``Unsupported``, ``NotFound``, ``Forbidden``
        (registry), ``Conflict`` (the source changed), ``Unavailable`` (disk, engine,
        registry), ``DeadlineExceeded`` or
        ``Internal`` (the result differs from the source); nothing is stored then.
        """
        if cancelled():
            raise Cancelled
        meter = Meter(progress, cancelled, seconds_max=self._limits.seconds_max)
        with self._store.workspace() as work, searched_rarely(), ExitStack() as stack:
            spool = stack.enter_context(
                Spool(work, bytes_max=self._limits.unpacked_bytes_max, progress=meter.advance)
            )
            reading = Reading(
                request, self._limits, work, spool=spool, stack=stack, meter=meter,
                engine=self._engine, registries=self._registries,
            )  # fmt: skip
            roots, config = reading.read()
            meter.start("writing", sum(stored_bytes(root) for root in roots))
            if meter.total_bytes > self._limits.unpacked_bytes_max:
                raise InvalidRequest(
                    f"{meter.total_bytes} bytes; the limit is {self._limits.unpacked_bytes_max}",
                    field="path",
                )
            first = read_first(roots, command=[*config.entrypoint, *config.cmd])
            built = self._built(roots, work, first, meter)
            reading.confirm()
            meter.start("storing", meter.total_bytes)
            keep(built)
            stored = [self._store.put_layer(files) for files in built]
        return ImportResult(stored, config)

    def _built(
        self, roots: Sequence[Inode], work: Path, first: Sequence[Inode], meter: Meter
    ) -> list[LayerFiles]:
        built = []
        for number, root in enumerate(roots):
            folder = work / f"layer{number}"
            folder.mkdir()
            made = build_layer(
                root, folder, verify=self._verify, progress=meter.advance, first=first,
                # by the layer alone: it is the same one in images that run other programs
                together=read_first([root], command=()),
                durable=isinstance(self._store, FolderStore),
            )  # fmt: skip
            built.append(made)
        return built

    def close(self) -> None:
        """Wait for running imports and release the threads."""
        self._pool.shutdown()
        self._small.shutdown()
