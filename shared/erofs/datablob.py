"""The data blob of a layer while it is written.

Owns: appending whole blocks, chunk digests, digests of files and writing beside reading.
Does not own: what goes where.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import TracebackType

from shared.blobs.layout import DATA_CHUNK_BYTES
from shared.erofs.format import BLOCK_BYTES, HOLE
from shared.errors import Unsupported

FLUSH_BYTES = 16 * DATA_CHUNK_BYTES
PENDING_MAX_BYTES = 4 * FLUSH_BYTES
"""What may wait for the thread: a reader that was held up by small files catches up with it."""
BLOCKS_MAX = HOLE - 1


class DataBlob:
    """Writes ``path`` (which must not exist); digests and writes run in a thread, in order.

    At most :data:`PENDING_MAX_BYTES` wait for it, or one piece that is larger.
    """

    def __init__(self, path: Path) -> None:
        self.blocks = 0
        self.chunk_digests: list[bytes] = []
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._buffer = bytearray()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="blob")
        self._pending: deque[tuple[Future[None], int]] = deque()
        self._pending_bytes = 0

    def __enter__(self) -> DataBlob:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._flush(len(self._buffer))
                self._wait(0)
        finally:
            self._thread.shutdown(cancel_futures=True)
            os.close(self._fd)

    def append(self, data: bytes) -> int:
        """Append ``data`` filled up to whole blocks; returns its first block number."""
        first = self.blocks
        self._buffer += data
        self._buffer += bytes(-len(data) % BLOCK_BYTES)
        self.blocks += -(-len(data) // BLOCK_BYTES)
        if self.blocks > BLOCKS_MAX:
            raise Unsupported("a layer with more than 16 TiB of data")
        if len(self._buffer) >= FLUSH_BYTES:
            self._flush(len(self._buffer) // DATA_CHUNK_BYTES * DATA_CHUNK_BYTES)
        return first

    def digest(self, update: Callable[[bytes], None], data: bytes) -> None:
        """Have ``update`` called with ``data`` in the thread; done when the context ends."""
        self._beside(partial(update, data), len(data))

    def _flush(self, length: int) -> None:
        full, self._buffer = self._buffer, self._buffer[length:]
        self._beside(partial(self._write, memoryview(full)[:length]), length)

    def _beside(self, work: Callable[[], None], length: int) -> None:
        self._wait(max(0, PENDING_MAX_BYTES - length))
        self._pending.append((self._thread.submit(work), length))
        self._pending_bytes += length

    def _wait(self, bytes_max: int) -> None:
        """Until no more than so many bytes are pending; raises what the thread met."""
        while self._pending and (self._pending_bytes > bytes_max or self._pending[0][0].done()):
            work, length = self._pending.popleft()
            work.result()
            self._pending_bytes -= length

    def _write(self, view: memoryview) -> None:
        for at in range(0, len(view), DATA_CHUNK_BYTES):
            self.chunk_digests.append(hashlib.sha256(view[at : at + DATA_CHUNK_BYTES]).digest())
        while view:
            view = view[os.write(self._fd, view) :]
