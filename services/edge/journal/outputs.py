"""Whole outputs that are too long for their records, until the services have them.

Owns: their files on the node's disk, the bounds of these, that each output gets to the
services whatever dies in between. Does not own: head and tail (logged), who refers to an
output (outcomes).

A file is written as the output comes, in no hurry: by the system's cache. When its
operation has ended it is hashed and gets its last name, which says what it is, so that the
next process sends what this one could not. What has no last name then is of no use.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from schemas.base import Ok
from schemas.exec import WholeOutput
from schemas.trajectory import OUTPUT_PIECE_BYTES, OutputPiece, output_of
from services.edge.drivers.base import Stream
from services.edge.link import Link
from shared.errors import Unavailable
from shared.trajectory import Record

log = logging.getLogger(__name__)

PART = ".part"
SEND_S = 10.0
BACKOFF_MIN_S, BACKOFF_MAX_S = 0.2, 10.0


@dataclass(frozen=True, slots=True)
class Room:
    """``output_bytes`` of one stream, ``spool_bytes`` of all that the services do not have
    yet: what is over either is not kept."""

    output_bytes: int
    spool_bytes: int


class Spooled:
    """A file that grows with an output, until it is over a bound or the disk is full."""

    def __init__(self, outputs: Outputs, name: str, stream: Stream) -> None:
        self.stream = stream
        self.size = 0
        self._outputs = outputs
        self.path = outputs.folder / name
        self._part = self.path.with_name(name + PART)
        self._fd = -1

    def write(self, data: bytes) -> None:
        """Goes on with the output. Never raises: what cannot be kept is not."""
        if self._fd < 0 and self.size:
            return
        try:
            if not self._outputs.takes(self.size, len(data)):
                raise OSError("there is no room")
            self.size += len(data)
            if self._fd < 0:
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
                self._fd = os.open(self._part, flags, 0o600)
            left = memoryview(data)
            while left:
                left = left[os.write(self._fd, left) :]
        except OSError as exc:
            log.info("output %s is not kept as a whole: %s", self.path.name, exc)
            self.drop()

    def drop(self) -> None:
        """Nothing is kept of it."""
        self._close()
        self._outputs.give_back(self.size)
        self.size = max(self.size, 1)  # and nothing will be
        self._part.unlink(missing_ok=True)

    def seal(self) -> WholeOutput | None:
        """It is complete; ``None`` where it was dropped. Blocks."""
        if self._fd < 0:
            return None
        self._close()
        with self._part.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        self._part.rename(self.path)
        return WholeOutput(stream=self.stream, bytes=self.size, sha256=digest)

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class Outputs:
    """Those of one node, in a folder of ``state``."""

    def __init__(self, state: Path, *, node: str, link: Link, room: Room) -> None:
        self.folder = state / "outputs"
        self._node = node
        self._link = link
        self._room = room
        self._held = 0
        self._ready: deque[Path] = deque()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Finds what an earlier process left, and begins to send."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for path in sorted(self.folder.iterdir()):
                if path.suffix == PART:
                    path.unlink()
                else:
                    self._held += path.stat().st_size
                    self._ready.append(path)
        except OSError as exc:
            log.warning("no whole outputs are kept: %s", exc)
        self._task = asyncio.create_task(self._run(), name="outputs")

    async def close(self) -> None:
        """Ends; what is unsent stays on the disk."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def begin(self, record: Record, stream: Stream) -> Spooled:
        """Of the operation with this record."""
        return Spooled(self, f"{record.uid}.{record.project}.{record.seq}.{stream}", stream)

    def takes(self, size: int, more: int) -> bool:
        """Whether an output of ``size`` bytes may grow; then that much is taken."""
        room = self._room
        if size + more > room.output_bytes or self._held + more > room.spool_bytes:
            return False
        self._held += more
        return True

    def give_back(self, size: int) -> None:
        """So much is on the disk no more."""
        self._held = max(0, self._held - size)

    async def seal(self, spooled: list[Spooled]) -> list[WholeOutput]:
        """Those of an operation that has ended, to be referred to."""
        found = []
        for one in spooled:
            try:
                whole = await asyncio.to_thread(one.seal)
            except OSError as exc:
                log.info("output %s is not kept as a whole: %s", one.path.name, exc)
                one.drop()
                continue
            if whole is not None:
                found.append(whole)
                self._ready.append(one.path)
        if found:
            self._wake.set()
        return found

    # -- to the services ------------------------------------------------------------------

    async def _run(self) -> None:
        backoff_s = BACKOFF_MIN_S
        while True:
            if not self._ready:
                self._wake.clear()
                await self._wake.wait()
            try:
                await self._send(self._ready[0])
                backoff_s = BACKOFF_MIN_S
            except Unavailable as exc:
                log.debug("outputs wait: %s", exc.message)
                await asyncio.sleep(backoff_s)
                backoff_s = min(BACKOFF_MAX_S, backoff_s * 2)
            except Exception as exc:  # one that nobody takes must not keep the others
                log.error("output %s is lost: %r", self._ready[0].name, exc)
                self._gone(self._ready[0])

    async def _send(self, path: Path) -> None:
        uid, project, seq, stream = path.name.split(".")
        number = 0
        with path.open("rb") as file:
            while data := await asyncio.to_thread(file.read, OUTPUT_PIECE_BYTES):
                piece = OutputPiece(
                    uid=uid, project=project, seq=int(seq),
                    stream=stream, piece=number, data=data,  # type: ignore[arg-type]
                )  # fmt: skip
                await self._link.bus.request(output_of(self._node), piece, Ok, timeout_s=SEND_S)
                number += 1
        self._gone(path)

    def _gone(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            self.give_back(path.stat().st_size)
            path.unlink()
        if self._ready and self._ready[0] == path:
            self._ready.popleft()
