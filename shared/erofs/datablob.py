"""The data blob of a layer while it is written.

Owns: appending whole blocks, chunk digests, writing beside reading. Does not own:
what goes where.
"""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

from shared.blobs.layout import DATA_CHUNK_BYTES
from shared.erofs.format import BLOCK_BYTES, HOLE
from shared.errors import Unsupported

FLUSH_BYTES = 16 * DATA_CHUNK_BYTES
BLOCKS_MAX = HOLE - 1


class DataBlob:
    """Writes ``path`` (which must not exist); digests and writes run in a thread.

    At most two buffers of :data:`FLUSH_BYTES` exist: one filled, one written.
    """

    def __init__(self, path: Path) -> None:
        self.blocks = 0
        self.chunk_digests: list[bytes] = []
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._buffer = bytearray()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="blob")
        self._writing: Future[None] | None = None

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
                self._wait()
        finally:
            self._thread.shutdown()
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

    def _flush(self, length: int) -> None:
        self._wait()
        full, self._buffer = self._buffer, self._buffer[length:]
        self._writing = self._thread.submit(self._write, memoryview(full)[:length])

    def _wait(self) -> None:
        if self._writing is not None:
            self._writing.result()

    def _write(self, view: memoryview) -> None:
        for at in range(0, len(view), DATA_CHUNK_BYTES):
            self.chunk_digests.append(hashlib.sha256(view[at : at + DATA_CHUNK_BYTES]).digest())
        while view:
            view = view[os.write(self._fd, view) :]
