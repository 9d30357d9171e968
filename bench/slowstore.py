"""A read-only S3 server over a folder of layers that answers after a delay.

``python -m bench.slowstore FOLDER DELAY_MS`` prints its port. For measuring only: it speaks as
much of S3 as a reader of whole objects and ranges needs, and checks no signature.
"""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

PIECE = 1024 * 1024
_RANGE = re.compile(rb"^range: *bytes=(\d+)-(\d+)", re.I | re.M)
_FIXED = b'ETag: "bench"\r\nLast-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\n'


class SlowStore:
    """Serves ``folder`` as any bucket; each answer begins ``delay_s`` after its request."""

    def __init__(self, folder: Path, delay_s: float) -> None:
        self._folder, self._delay_s = folder, delay_s

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                await asyncio.sleep(self._delay_s)
                await self._answer(head, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def _answer(self, head: bytes, writer: asyncio.StreamWriter) -> None:
        method, target, _ = head.split(b" ", 2)
        name = target.decode().partition("?")[0].lstrip("/").partition("/")[2]
        path = (self._folder / name).resolve()
        if not path.is_relative_to(self._folder) or not path.is_file():
            writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
            return
        size = path.stat().st_size
        found = _RANGE.search(head)
        first, last = (int(found[1]), min(int(found[2]), size - 1)) if found else (0, size - 1)
        status = b"206 Partial Content" if found else b"200 OK"
        writer.write(
            b"HTTP/1.1 %s\r\nContent-Length: %d\r\n" % (status, last - first + 1) + _FIXED
            + (b"Content-Range: bytes %d-%d/%d\r\n" % (first, last, size) if found else b"")
            + b"\r\n"
        )  # fmt: skip
        if method == b"HEAD":
            return
        with path.open("rb") as file:
            file.seek(first)
            left = last - first + 1
            while left:
                piece = file.read(min(PIECE, left))
                writer.write(piece)
                await writer.drain()
                left -= len(piece)


async def main(folder: Path, delay_s: float) -> None:
    """Serves until it is ended."""
    store = SlowStore(folder.resolve(), delay_s)
    server = await asyncio.start_server(store.serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), float(sys.argv[2]) / 1000))
