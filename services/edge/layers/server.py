"""Answers the kernel: a folder of read-only files, one for each layer's data.

Owns: the FUSE descriptor's requests and replies. Does not own: the descriptor itself (the
keeper), data (chunks), which layers there are (catalog). What is in memory or the page cache
is answered at once; all else becomes a task, and the kernel bounds how many there are by
those who wait.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections.abc import Callable, Sequence

from services.edge.layers import fuse
from services.edge.layers.catalog import Catalog, Known
from services.edge.layers.chunks import Chunks, Piece
from services.edge.layers.opens import Opens
from services.edge.layers.profiles import Profiles
from shared.blobs.layout import DATA_CHUNK_BYTES
from shared.errors import DsecError

log = logging.getLogger(__name__)

TURN_MAX = 64
"""Requests answered before others get their turn."""


class Server:
    """Serves ``fd``; ``ended`` is called when the kernel has ended the connection."""

    def __init__(
        self, fd: int, *, catalog: Catalog, chunks: Chunks, opens: Opens, profiles: Profiles,
        ended: Callable[[], None], released: Callable[[], None],
    ) -> None:  # fmt: skip
        self._fd = fd
        self._catalog, self._chunks, self._opens, self._profiles = catalog, chunks, opens, profiles
        self._ended, self._released = ended, released
        self._buffer = bytearray(fuse.REQUEST_BYTES)
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Begins, with what an earlier process left unanswered."""
        os.set_blocking(self._fd, False)
        try:
            os.write(self._fd, fuse.resend())
        except OSError as error:  # kernels before 6.9
            log.warning("requests are not sent again: %s", error.strerror)
        asyncio.get_running_loop().add_reader(self._fd, self._readable)

    def stop(self) -> None:
        """Reads no more; what is at hand is left to the next process."""
        asyncio.get_running_loop().remove_reader(self._fd)
        for task in self._tasks:
            task.cancel()

    def _readable(self) -> None:
        for _ in range(TURN_MAX):
            try:
                length = os.readv(self._fd, [self._buffer])
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EINTR, errno.ENOENT):  # the request was taken back
                    continue
                self.stop()
                self._ended()
                return
            operation, unique, node, body = fuse.request(memoryview(self._buffer)[:length])
            try:
                self._handle(operation, unique, node, body)
            except Exception:  # whoever waits in the kernel must get an answer
                log.exception("operation %d", operation)
                self._fail(unique, errno.EIO)

    def _handle(self, operation: int, unique: int, node: int, body: memoryview) -> None:
        if operation == fuse.READ:
            self._read(unique, node, *fuse.read_range(body))
        elif operation == fuse.LOOKUP:
            known = self._catalog.by_name(fuse.name_of(body)) if node == fuse.ROOT_NODE else None
            self._answer(unique, fuse.entry(known.node, known.data_bytes) if known else None)
        elif operation == fuse.GETATTR:
            known = self._catalog.by_node(node)
            found = node == fuse.ROOT_NODE or known
            size = known.data_bytes if known else 0
            self._answer(unique, fuse.attribute_answer(node, size) if found else None)
        elif operation == fuse.OPEN:
            self._open(unique, node)
        elif operation == fuse.RELEASE:
            self._release(unique, fuse.handle_of(body))
        elif operation in (fuse.OPENDIR, fuse.READDIR, fuse.RELEASEDIR, fuse.FLUSH):
            # the folder is for those who know a layer's name: it lists none
            self._answer(unique, fuse.open_answer(0) if operation == fuse.OPENDIR else b"")
        elif operation == fuse.STATFS:
            self._answer(unique, fuse.statfs_answer())
        elif operation == fuse.DESTROY:
            self._answer(unique, b"")
        elif operation not in fuse.UNANSWERED:
            self._fail(unique, errno.ENOSYS)

    def _open(self, unique: int, node: int) -> None:
        known = self._catalog.by_node(node)
        if known is None:
            self._fail(unique, errno.ENOENT)
            return
        handle = unique & ~fuse.RESENT
        self._opens.opened(handle, known.digest)
        self._answer(unique, fuse.open_answer(handle))

    def _release(self, unique: int, handle: int) -> None:
        digest = self._opens.closed(handle)
        self._answer(unique, b"")
        if digest is not None and not self._opens.is_open(digest):
            known = self._catalog.by_name(digest)
            if known is not None:
                self._profiles.finish(known.folder)
        self._released()

    def _read(self, unique: int, node: int, offset: int, length: int) -> None:
        known = self._catalog.by_node(node)
        if known is None:
            self._fail(unique, errno.ENOENT)
            return
        length = max(0, min(length, known.data_bytes - offset))
        if length:
            end = (offset + length - 1) // DATA_CHUNK_BYTES + 1
            self._profiles.used(known.folder, range(offset // DATA_CHUNK_BYTES, end))
        pieces = self._chunks.cached(known, offset, length)
        if pieces is not None:
            self._write(fuse.head(unique, length), pieces)
            return
        task = asyncio.create_task(self._slow_read(unique, known, offset, length))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _slow_read(self, unique: int, known: Known, offset: int, length: int) -> None:
        try:
            pieces = await self._chunks.read(known, offset, length)
        except DsecError as error:
            log.warning("read of layer %s: %s", known.digest, error.message)
            self._fail(unique, errno.EIO)
        except Exception:
            log.exception("read of layer %s", known.digest)
            self._fail(unique, errno.EIO)
        else:
            self._write(fuse.head(unique, length), pieces)

    def _answer(self, unique: int, content: bytes | None) -> None:
        """``None``: there is no such file."""
        if content is None:
            self._fail(unique, errno.ENOENT)
        else:
            self._write(fuse.head(unique, len(content)), [content])

    def _fail(self, unique: int, number: int) -> None:
        self._write(fuse.head(unique, error=number), [])

    def _write(self, head: bytes, pieces: Sequence[Piece | bytes]) -> None:
        try:
            os.writev(self._fd, [head, *pieces])
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENODEV):  # nobody waits any more
                log.warning("an answer was refused: %s", error.strerror)
