"""The serving half of the layer service: ``python -m services.edge.layers.worker``.

Owns: its composition. Started by the keeper, which holds the FUSE descriptor over its death.
When the keeper is gone it serves on as long as layers are open, until another keeper takes
the descriptors over; then, or when nothing is open, it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Sequence

from services.edge.layers import control
from services.edge.layers.cache import LayerCache
from services.edge.layers.catalog import Catalog, Here, Known
from services.edge.layers.chunks import Chunks
from services.edge.layers.control import Answer, Control, Place, Question
from services.edge.layers.faults import Faults
from services.edge.layers.opens import Opens
from services.edge.layers.profiles import Profiles
from services.edge.layers.server import Server
from services.edge.layers.settings import Settings
from services.edge.layers.traces import Traces
from shared import process
from shared.blobs.layout import DATA_CHUNK_BYTES
from shared.blobs.opening import open_store
from shared.errors import DsecError, Unavailable
from shared.health import Health

WARM_PIECES, PIECE_BYTES = 24, 2 * 1024 * 1024
"""Memory that the worker begins with, in pieces that its library keeps when they are free: on a
virtual machine pages that nobody had before cost far more than those that somebody had, and who
starts a program should not pay for them."""
NOBODY = "0" * 64
"""The digest of no layer."""
PLACES = 8
"""Layers of one image whose metadata is fetched at a time, each in a few MiB of memory."""
HANDED_OVER_S = 0.05
"""For the answer that hands over to leave."""


class Worker:
    """All parts, wired; ``stop`` is set when it has nothing more to do."""

    def __init__(self, settings: Settings, stop: asyncio.Event) -> None:
        self._settings, self._stop = settings, stop
        self._keeper_gone = False
        self._reader = reader = open_store(
            settings, retries=settings.layers_request_retries, request_s=settings.layers_request_s
        )
        self.faults = Faults()
        self.opens = Opens(settings.root / "open" / settings.layers_connection)
        self.cache = LayerCache(
            settings.root / "cache", cap_bytes=settings.layers_cache_bytes,
            reserve_bytes=settings.layers_reserve_bytes, in_use=self.opens.in_use,
        )  # fmt: skip
        self.catalog = Catalog(
            reader, self.cache, settings=settings, faults=self.faults, coming=self._coming
        )
        self.chunks = Chunks(reader, self.cache, settings=settings, faults=self.faults)
        self.traces = Traces(DATA_CHUNK_BYTES)
        self.profiles = Profiles(
            seconds=settings.layers_profile_s, chunks_max=settings.layers_profile_chunks_max,
            finished=lambda folder, chunks: self.traces.add(folder.name, chunks),
        )  # fmt: skip
        self.server = Server(
            settings.layers_fuse_fd, catalog=self.catalog, chunks=self.chunks, opens=self.opens,
            profiles=self.profiles, ended=stop.set, released=self._look,
        )  # fmt: skip
        self._prefetching: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        health = Health("layers")
        health.add("server", self._check)
        if self._settings.health_port:
            await health.serve(self._settings.health_port)
        self.server.start()
        acquainting = asyncio.create_task(self._acquaint())
        questions = Control(self._settings.root, self.answer)
        if self._settings.layers_keeper_fd >= 0:
            loop.add_reader(self._settings.layers_keeper_fd, self._alone)
        try:
            await self._stop.wait()
        finally:
            self.server.stop()
            for task in (acquainting, *self._prefetching.values()):
                task.cancel()
            await questions.close()
            await self.chunks.close()
            await health.close()

    async def _acquaint(self) -> None:
        """Asks the store for nothing: the first layer need not wait for names, credentials
        and a connection."""
        with contextlib.suppress(DsecError):
            await self._reader.fetch_manifest(NOBODY)

    async def _check(self) -> None:
        if self._stop.is_set():
            raise Unavailable("the connection to the kernel has ended")

    def _alone(self) -> None:
        """The keeper's end of the pipe is closed: it has ended."""
        asyncio.get_running_loop().remove_reader(self._settings.layers_keeper_fd)
        self._keeper_gone = True
        self._look()

    def _look(self) -> None:
        if self._keeper_gone and not len(self.opens):
            self._stop.set()

    async def answer(self, question: Question) -> tuple[Answer, list[int]]:
        """What a question on the control socket comes to."""
        answer = Answer(connection=self._settings.layers_connection)
        if question.ask == "mount":
            return answer, [self._settings.layers_mount_fd]
        if question.ask == "hand_over":
            self.server.stop()
            answer.stats = self._stats()
            asyncio.get_running_loop().call_later(HANDED_OVER_S, self._stop.set)
            return answer, [self._settings.layers_fuse_fd, self._settings.layers_mount_fd]
        if question.ask == "faults":
            answer.faults = self.faults.after(question.after)
        elif question.ask == "traces":
            answer.traces = self.traces.after(question.after)
        elif question.ask == "stats":
            await self.chunks.written()
            answer.stats = self._stats()
        elif question.ask == "fetched":
            answer.stats = {one: self.chunks.fetched_of[one] for one in question.digests}
        else:
            try:
                answer.places = await self._placed(question.digests)
            except DsecError as error:
                answer.error = (error.code, error.message)
        return answer, []

    async def _placed(self, digests: Sequence[str]) -> list[Place]:
        """Layers, some at a time: each costs trips to the store. The first of them that cannot
        be had is told."""
        slots = asyncio.Semaphore(PLACES)

        async def one(digest: str) -> Place:
            async with slots:
                return await self._place(digest)

        tasks = [asyncio.create_task(one(digest)) for digest in digests]
        try:
            return [await task for task in tasks]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _place(self, digest: str) -> Place:
        known = await self.catalog.prepare(digest)
        if not self.opens.in_use(digest):
            # what the store says is wanted first, where nothing was read here before
            self._prefetch(known, self.profiles.of(known.folder) or known.first)
        self.opens.hold(digest, self._settings.layers_hold_s)
        return Place(digest, str(known.meta), known.data_bytes > 0)

    def _coming(self, known: Known, here: Here) -> None:
        """Its data comes beside its metadata, to be verified after it."""
        self.chunks.expect(known.digest, here)
        self._prefetch(known, known.first)

    def _prefetch(self, known: Known, hints: Sequence[int]) -> None:
        digest = known.digest
        chunks = [one for one in hints if 0 <= one < known.chunks]
        if not chunks or digest in self._prefetching:
            return
        task = asyncio.create_task(self.chunks.prefetch(known, chunks))
        self._prefetching[digest] = task
        task.add_done_callback(lambda _: self._prefetching.pop(digest, None))

    def _stats(self) -> dict[str, int]:
        return {
            "fetched_bytes": self.chunks.fetched_bytes, "fetches": self.chunks.fetches,
            "ahead": self.chunks.ahead,
            "cache_bytes": self.cache.bytes, "evicted": self.cache.evicted,
            "open": len(self.opens), "pid": os.getpid(),
        }  # fmt: skip


def _warm() -> None:
    for piece in [bytearray(PIECE_BYTES) for _ in range(WARM_PIECES)]:
        piece.clear()


async def main(settings: Settings, stop: asyncio.Event) -> None:
    """Runs the worker until ``stop``."""
    _warm()
    worker = Worker(settings, stop)
    with contextlib.suppress(asyncio.CancelledError):
        await worker.run()


if __name__ == "__main__":
    configured = process.configured("layers", Settings)
    if configured.layers_fuse_fd < 0:
        sys.exit(f"it is started by {control.__package__}")
    process.run("layers", configured, lambda stop: main(configured, stop))
