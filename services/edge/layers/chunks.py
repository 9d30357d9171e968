"""Chunks of layers on demand: from memory, the cache, or the store, and always right.

Owns: single flight, verification before anything is cached or handed on, one refetch of a
damaged chunk, deadlines, bounds on fetches and memory. Does not own: files (cache), which
layers there are (catalog), the kernel.

A fetch is of a unit (one or several chunks) and is made once however many wait for it. While
the store is away a fetch is repeated until the reader's deadline; then the read fails, and the
next one tries anew.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from services.edge.layers.cache import LayerCache
from services.edge.layers.catalog import Known
from services.edge.layers.faults import Faults
from services.edge.layers.settings import Settings
from shared.blobs.base import LayerReader
from shared.blobs.layout import DATA_CHUNK_BYTES, DATA_NAME, Damaged
from shared.errors import DeadlineExceeded, DsecError, Internal, NotFound, Unavailable

log = logging.getLogger(__name__)

RETRY_FIRST_S, RETRY_MAX_S = 0.1, 2.0
THREADS = 4
"""For digests and the disk."""
T = TypeVar("T")
Found = dict[int, bytes]
Piece = bytearray | memoryview


class Chunks:
    """Reads of layers' data, by byte range."""

    def __init__(
        self, reader: LayerReader, cache: LayerCache, *, settings: Settings, faults: Faults
    ) -> None:
        self._reader, self._cache, self._settings, self._faults = reader, cache, settings, faults
        self._hot: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self._flights: dict[tuple[str, int], asyncio.Future[Found]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._slots = asyncio.Semaphore(settings.layers_fetches)
        self._prefetches = asyncio.Semaphore(settings.layers_prefetches)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="chunks")
        self.fetched_bytes = 0
        self.fetches = 0
        self.ahead = 0
        """Fetches begun before anyone asked."""

    def cached(self, layer: Known, offset: int, length: int) -> list[Piece] | None:
        """The bytes, if none must be waited for."""
        pieces: list[Piece] = []
        for index, start, count in _parts(offset, length):
            key = (layer.digest, index)
            hot = self._hot.get(key)
            if hot is not None:
                pieces.append(memoryview(hot)[start : start + count])
            elif (piece := self._cache.read(key, start, count)) is not None:
                pieces.append(piece)
            else:
                return None
        return pieces

    async def read(self, layer: Known, offset: int, length: int) -> list[Piece]:
        """The bytes. Raises a typed error at the deadline at the latest."""
        try:
            async with asyncio.timeout(self._settings.layers_read_deadline_s):
                parts = _parts(offset, length)
                found: Found = {}
                per = self._settings.chunks_per_unit
                units = sorted({part[0] // per for part in parts})
                for unit in units:
                    self._flight(layer, unit)  # side by side
                for unit in units:
                    self._read_ahead(layer, unit)
                for unit in units:
                    found |= await self._unit(layer, unit)
                return [memoryview(found[i])[start : start + count] for i, start, count in parts]
        except TimeoutError:
            message = f"no data in {self._settings.layers_read_deadline_s:g} s"
            self._faults.tell("deadline", layer.digest, offset // DATA_CHUNK_BYTES, message)
            raise DeadlineExceeded(message, cause="image") from None

    def _read_ahead(self, layer: Known, unit: int) -> None:
        """The other half of an aligned pair: who starts a program goes on near by, and
        its latency is the same as that of the half that is waited for."""
        per = self._settings.chunks_per_unit
        other = unit ^ 1
        chunks = range(other * per, min((other + 1) * per, layer.chunks))
        if not all(self._cache.has((layer.digest, chunk)) for chunk in chunks):
            self.ahead += (layer.digest, other) not in self._flights
            self._flight(layer, other)

    async def _unit(self, layer: Known, unit: int) -> Found:
        while True:
            try:
                return await asyncio.shield(self._flight(layer, unit))
            except DeadlineExceeded:
                continue  # another reader's deadline; ours ends this

    async def prefetch(self, layer: Known, units: Sequence[int]) -> None:
        """Brings units into the cache, in order, beside what is asked for."""

        async def one(unit: int) -> None:
            try:
                await asyncio.shield(self._flight(layer, unit))
            except DsecError as error:
                log.debug("prefetch of %s: %s", layer.digest, error.message)
            finally:
                self._prefetches.release()

        async with asyncio.TaskGroup() as group:
            for unit in units:
                await self._prefetches.acquire()
                group.create_task(one(unit))

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _flight(self, layer: Known, unit: int) -> asyncio.Future[Found]:
        key = (layer.digest, unit)
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = asyncio.get_running_loop().create_future()
            flight.add_done_callback(lambda done: done.cancelled() or done.exception())
            task = asyncio.create_task(self._fly(layer, unit, flight))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return flight

    async def _fly(self, layer: Known, unit: int, flight: asyncio.Future[Found]) -> None:
        """Settles ``flight`` as soon as the unit is verified, then writes it to the cache."""
        try:
            async with self._slots:
                found, missing = await self._from_cache(layer, unit)
                fresh = await self._fetched(layer, missing) if missing else {}
                for index, data in fresh.items():
                    self._keep_hot((layer.digest, index), data)
                flight.set_result(found | fresh)
                for index, data in fresh.items():
                    await self._store((layer.digest, index), data)
        except DsecError as error:
            if not flight.done():
                flight.set_exception(error)
        except TimeoutError:
            flight.set_exception(DeadlineExceeded("the store did not answer in time"))
        except Exception as error:  # whoever waits must hear of it
            log.exception("fetch of %s", layer.digest)
            if not flight.done():
                flight.set_exception(Internal(f"{type(error).__name__} while fetching"))
        finally:
            flight.cancel()
            self._flights.pop((layer.digest, unit), None)

    async def _from_cache(self, layer: Known, unit: int) -> tuple[Found, list[int]]:
        """What is here and right of a unit, and which chunks are not."""
        per = self._settings.chunks_per_unit
        found: Found = {}
        missing: list[int] = []
        for index in range(unit * per, min((unit + 1) * per, layer.chunks)):
            key = (layer.digest, index)
            data = self._hot.get(key)
            if data is None and self._cache.has(key):
                data = await self._run(self._cache.content, key)
                if data is not None and await self._run(_right, data, layer.chunk_digest(index)):
                    self._cache.verified(key)
                else:
                    data = None
                    self._cache.discard(key)
            if data is None:
                missing.append(index)
            else:
                found[index] = data
        return found, missing

    async def _fetched(self, layer: Known, missing: Sequence[int]) -> Found:
        """Chunks ``missing`` (and any between them) from the store, verified."""
        first, last = missing[0], missing[-1]
        async with asyncio.timeout(self._settings.layers_read_deadline_s):
            found = await self._try(layer, first, last)
            for index, data in found.items():
                if not await self._run(_right, data, layer.chunk_digest(index)):
                    found[index] = await self._again(layer, index)
        return found

    async def _again(self, layer: Known, index: int) -> bytes:
        """A damaged chunk may have been damaged on its way; a second time it is not."""
        data = (await self._try(layer, index, index))[index]
        if await self._run(_right, data, layer.chunk_digest(index)):
            return data
        message = f"chunk {index} of layer {layer.digest} is damaged in the store"
        self._faults.tell("damaged", layer.digest, index, message)
        raise Damaged(message, cause="image")

    async def _try(self, layer: Known, first: int, last: int) -> Found:
        start = first * DATA_CHUNK_BYTES
        length = min((last + 1) * DATA_CHUNK_BYTES, layer.data_bytes) - start
        delay = RETRY_FIRST_S
        while True:
            try:
                data = await self._reader.fetch(layer.digest, DATA_NAME, start, length)
                break
            except NotFound as error:
                self._faults.tell("missing", layer.digest, first, error.message)
                raise
            except Unavailable as error:
                self._faults.tell("unavailable", layer.digest, first, error.message)
                await asyncio.sleep(delay)
                delay = min(RETRY_MAX_S, delay * 2)
        self.fetches += 1
        self.fetched_bytes += len(data)
        at = range(0, (last - first + 1) * DATA_CHUNK_BYTES, DATA_CHUNK_BYTES)
        return {first + n: data[o : o + DATA_CHUNK_BYTES] for n, o in enumerate(at)}

    def _keep_hot(self, key: tuple[str, int], data: bytes) -> None:
        self._hot[key] = data
        while len(self._hot) > self._settings.layers_hot_chunks:
            self._hot.popitem(last=False)

    async def _store(self, key: tuple[str, int], data: bytes) -> None:
        if not self._cache.make_room(len(data)):
            return  # a full disk slows reading down, it does not stop it
        if await self._run(self._cache.write, key, data):
            self._cache.put(key, len(data))

    async def _run(self, work: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)


def _right(data: bytes, digest: bytes) -> bool:
    return hashlib.sha256(data).digest() == digest


def _parts(offset: int, length: int) -> list[tuple[int, int, int]]:
    """A byte range as chunk, start in it, length."""
    parts = []
    while length > 0:
        index, start = divmod(offset, DATA_CHUNK_BYTES)
        count = min(length, DATA_CHUNK_BYTES - start)
        parts.append((index, start, count))
        offset, length = offset + count, length - count
    return parts
