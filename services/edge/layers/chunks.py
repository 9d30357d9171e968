"""Chunks of layers on demand: from memory, the cache, or the store, and always right.

Owns: single flight, verification before anything is cached or handed on, one refetch of a
damaged chunk, deadlines, bounds on fetches and memory. Does not own: files (cache), which
layers there are (catalog), the kernel.

A fetch is of a unit (one or several chunks) or, ahead, of those of its chunks that are
expected to be read; a chunk is fetched once however many wait for it. While
the store is away a fetch is repeated until the reader's deadline; then the read fails, and the
next one tries anew.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from services.edge.layers.behind import Behind
from services.edge.layers.cache import Key, LayerCache
from services.edge.layers.catalog import Here, Known
from services.edge.layers.faults import Faults
from services.edge.layers.settings import Settings
from shared.blobs.base import Content, LayerReader
from shared.blobs.layout import DATA_CHUNK_BYTES, DATA_NAME, Damaged
from shared.errors import DeadlineExceeded, DsecError, Internal, NotFound, Unavailable

log = logging.getLogger(__name__)

RETRY_FIRST_S, RETRY_MAX_S = 0.1, 2.0
THREADS = 4
"""For digests and the disk."""
T = TypeVar("T")
Found = dict[int, Content]
Piece = bytearray | memoryview


class Chunks:
    """Reads of layers' data, by byte range."""

    def __init__(
        self, reader: LayerReader, cache: LayerCache, *, settings: Settings, faults: Faults
    ) -> None:
        self._reader, self._cache, self._settings, self._faults = reader, cache, settings, faults
        self._hot: OrderedDict[Key, Content] = OrderedDict()
        self._flights: dict[tuple[str, int], asyncio.Future[Found]] = {}
        self._coming: dict[str, Here] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._slots = asyncio.Semaphore(settings.layers_fetches)
        self._prefetches = asyncio.Semaphore(settings.layers_prefetches)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="chunks")
        self._behind = Behind(
            cache, lambda key, data: self._run(cache.write, key, data),
            bytes_max=settings.layers_behind_bytes,
        )  # fmt: skip
        self.fetched_bytes = 0
        self.fetched_of = Counter[str]()
        """By layer."""
        self.fetches = 0
        self.ahead = 0
        """Fetches begun before anyone asked."""

    def cached(self, layer: Known, offset: int, length: int) -> list[Piece] | None:
        """The bytes, if none must be waited for."""
        pieces: list[Piece] = []
        for index, start, count in _parts(offset, length):
            key = (layer.digest, index)
            hot = self._in_memory(key)
            if hot is not None:
                pieces.append(memoryview(hot)[start : start + count])
            elif (piece := self._cache.read(key, start, count)) is not None:
                pieces.append(piece)
            else:
                return None
        return pieces

    def _in_memory(self, key: Key) -> Content | None:
        return self._hot.get(key) or self._behind.get(key)

    def _here(self, key: Key) -> bool:
        return self._cache.has(key) or self._behind.get(key) is not None

    def _missing(self, key: Key) -> bool:
        """Whether it is neither here nor on its way: what is brings no neighbours along."""
        return key not in self._flights and not self._here(key)

    async def read(self, layer: Known, offset: int, length: int) -> list[Piece]:
        """The bytes. Raises a typed error at the deadline at the latest."""
        try:
            async with asyncio.timeout(self._settings.layers_read_deadline_s):
                parts = _parts(offset, length)
                per = self._settings.chunks_per_unit
                missing = (part[0] for part in parts if self._missing((layer.digest, part[0])))
                units = sorted({index // per for index in missing})
                for unit in units:
                    self._launch(layer, self._chunks_of(layer, unit))  # side by side
                for unit in units:
                    self._read_ahead(layer, unit)
                found = await self._landed(layer, [part[0] for part in parts])
                return [memoryview(found[i])[start : start + count] for i, start, count in parts]
        except TimeoutError:
            message = f"no data in {self._settings.layers_read_deadline_s:g} s"
            self._faults.tell("deadline", layer.digest, offset // DATA_CHUNK_BYTES, message)
            raise DeadlineExceeded(message, cause="image") from None

    def _read_ahead(self, layer: Known, unit: int) -> None:
        """The other half of an aligned pair: who starts a program goes on near by, and
        its latency is the same as that of the half that is waited for."""
        chunks = self._chunks_of(layer, unit ^ 1)
        if not all(self._here((layer.digest, chunk)) for chunk in chunks):
            self.ahead += self._launch(layer, chunks)

    def _chunks_of(self, layer: Known, unit: int) -> range:
        per = self._settings.chunks_per_unit
        return range(unit * per, min((unit + 1) * per, layer.chunks))

    async def _landed(self, layer: Known, wanted: Sequence[int]) -> Found:
        """The contents of chunks, fetched where nobody does it yet."""
        found: Found = {}
        for index in wanted:
            while index not in found:
                self._launch(layer, [index])
                with suppress(DeadlineExceeded):  # another reader's; ours ends this
                    found |= await asyncio.shield(self._flights[layer.digest, index])
        return found

    async def prefetch(self, layer: Known, chunks: Sequence[int]) -> None:
        """Brings chunks into the cache, in order, beside what is asked for."""

        async def one(group: Sequence[int]) -> None:
            try:
                await self._landed(layer, group)
            except DsecError as error:
                log.debug("prefetch of %s: %s", layer.digest, error.message)
            finally:
                self._prefetches.release()

        async with asyncio.TaskGroup() as tasks:
            for group in grouped(chunks, self._settings.chunks_ahead):
                await self._prefetches.acquire()
                self._launch(layer, group)
                tasks.create_task(one(group))

    async def written(self) -> None:
        """Returns when what was fetched is on the disk, as far as there is room."""
        await self._behind.flush()

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._behind.flush()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def expect(self, digest: str, here: Here) -> None:
        """What is fetched of the layer until ``here`` is done can be verified only then."""
        self._coming[digest] = here
        here.add_done_callback(lambda _: self._coming.pop(digest, None))

    def _launch(self, layer: Known, chunks: Sequence[int]) -> bool:
        """Begins one fetch of those ``chunks`` that nobody fetches yet; whether there are
        any."""
        mine = [chunk for chunk in chunks if (layer.digest, chunk) not in self._flights]
        if not mine:
            return False
        flight: asyncio.Future[Found] = asyncio.get_running_loop().create_future()
        flight.add_done_callback(lambda done: done.cancelled() or done.exception())
        for chunk in mine:
            self._flights[layer.digest, chunk] = flight
        task = asyncio.create_task(self._fly(layer, mine, flight))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return True

    async def _fly(
        self, layer: Known, chunks: Sequence[int], flight: asyncio.Future[Found]
    ) -> None:
        """Settles ``flight`` as soon as all is verified, and leaves it to be written."""
        try:
            async with self._slots:
                found, missing = await self._from_cache(layer, chunks)
                fresh = await self._fetched(layer, missing) if missing else {}
                for index, data in fresh.items():
                    self._keep_hot((layer.digest, index), data)
                flight.set_result(found | fresh)
                for index, data in fresh.items():
                    await self._behind.put((layer.digest, index), data)
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
            for chunk in chunks:
                self._flights.pop((layer.digest, chunk), None)

    async def _from_cache(
        self, layer: Known, chunks: Sequence[int]
    ) -> tuple[Found, list[int]]:
        """What is here and right of them, and which are not."""
        found = {i: data for i in chunks if (data := self._in_memory((layer.digest, i)))}
        left = [i for i in chunks if i not in found and self._cache.has((layer.digest, i))]
        if left:
            right = await self._run(self._read_right, layer, left)
            for index in left:
                key = (layer.digest, index)
                self._cache.verified(key) if index in right else self._cache.discard(key)
            found |= right
        return found, [i for i in chunks if i not in found]

    def _read_right(self, layer: Known, chunks: Sequence[int]) -> Found:
        """Those whose files are as they should be. For any thread."""
        read = {index: self._cache.content((layer.digest, index)) for index in chunks}
        found: Found = {index: data for index, data in read.items() if data is not None}
        wrong = _wrong(layer, found)
        return {index: data for index, data in found.items() if index not in wrong}

    async def _fetched(self, layer: Known, missing: Sequence[int]) -> Found:
        """Chunks ``missing`` (and any between them) from the store, verified."""
        first, last = missing[0], missing[-1]
        async with asyncio.timeout(self._settings.layers_read_deadline_s):
            found = await self._try(layer, first, last)
            if layer.digest in self._coming:
                await asyncio.shield(self._coming[layer.digest])
            for index in await self._run(_wrong, layer, found):
                found[index] = await self._again(layer, index)
        return found

    async def _again(self, layer: Known, index: int) -> Content:
        """A damaged chunk may have been damaged on its way; a second time it is not."""
        found = await self._try(layer, index, index)
        if not await self._run(_wrong, layer, found):
            return found[index]
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
        self.fetched_of[layer.digest] += len(data)
        view = memoryview(data)  # the chunks of one fetch are one piece of memory
        at = range(0, (last - first + 1) * DATA_CHUNK_BYTES, DATA_CHUNK_BYTES)
        return {first + n: view[o : o + DATA_CHUNK_BYTES] for n, o in enumerate(at)}

    def _keep_hot(self, key: Key, data: Content) -> None:
        self._hot[key] = data
        while len(self._hot) > self._settings.layers_hot_chunks:
            self._hot.popitem(last=False)

    async def _run(self, work: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)


def _wrong(layer: Known, found: Mapping[int, Content]) -> list[int]:
    """The chunks that are other than they should be."""
    return [
        index
        for index, data in found.items()
        if hashlib.sha256(data).digest() != layer.chunk_digest(index)
    ]


def grouped(chunks: Sequence[int], most: int) -> list[list[int]]:
    """Neighbours among ``chunks``, up to ``most`` of them together and nothing between them
    that is not wanted; in the order of first appearance."""
    windows: dict[int, set[int]] = {}
    for chunk in chunks:
        windows.setdefault(chunk // most, set()).add(chunk)
    groups: list[list[int]] = []
    for window in windows.values():
        last: list[int] = []
        for chunk in sorted(window):
            if last and last[-1] == chunk - 1:
                last.append(chunk)
            else:
                last = [chunk]
                groups.append(last)
    return groups


def _parts(offset: int, length: int) -> list[tuple[int, int, int]]:
    """A byte range as chunk, start in it, length."""
    parts = []
    while length > 0:
        index, start = divmod(offset, DATA_CHUNK_BYTES)
        count = min(length, DATA_CHUNK_BYTES - start)
        parts.append((index, start, count))
        offset, length = offset + count, length - count
    return parts
