"""Environments as files that clients fetch.

Owns: making each once, how long it stays, reading pieces of it. Does not own: the
archive's form (``ociarchive``), who may ask. A client asks again until it is there; the
work goes on while nobody asks and is found by whoever asks next.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import tempfile
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from schemas.image import Blob, BlobGet, ImageReply
from schemas.sandbox import ImageConfig
from services.imagesvc.layerroot import opened_layer
from services.imagesvc.meter import Cancelled
from services.imagesvc.names import ImageName
from services.imagesvc.ociarchive import write_archive
from services.imagesvc.uploads import held_bytes, swept
from shared.blobs.base import BlobStore
from shared.blobs.layout import LayerManifest
from shared.blobs.scratch import disk_errors
from shared.errors import CapacityExhausted, DsecError, Internal, NotFound

QUEUE_MAX = 16
"""Exports under way or waiting."""
FIELD = "export"


@dataclass(frozen=True, slots=True)
class Environment:
    """What is exported: layers bottom first, defaults, the name it gets."""

    project: str
    name: ImageName
    layers: Sequence[str]
    config: ImageConfig

    @property
    def id(self) -> str:
        """The same for the same content, and no other project's."""
        parts = [self.project, str(self.name), list(self.layers), self.config]
        return hashlib.sha256(msgspec.json.encode(parts, order="deterministic")).hexdigest()


Keep = Callable[[str, Sequence[LayerManifest]], Awaitable[None]]
Release = Callable[[str], Awaitable[None]]


@dataclass(slots=True)
class _Job:
    task: asyncio.Task[Blob]
    cancelled: threading.Event
    done_bytes: int = 0
    total_bytes: int = 0

    def tick(self, done: int) -> None:
        if self.cancelled.is_set():
            raise Cancelled
        self.done_bytes += done

    @property
    def share(self) -> float:
        return min(0.99, self.done_bytes / self.total_bytes) if self.total_bytes else 0.0


@dataclass(slots=True)
class Exports:
    """Exports in ``folder``, from ``store``. ``keep`` and ``release`` hold an export's
    layers against collection while they are read; ``total_bytes_max`` bounds all together."""

    store: BlobStore
    folder: Path
    keep_s: float
    keep: Keep
    release: Release
    total_bytes_max: int
    _jobs: dict[str, _Job] = field(default_factory=dict)
    _thread: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="export")
    )

    async def get(self, wanted: Environment) -> ImageReply:
        """The finished export, or how far it is. Raises what its work raised."""
        found = await asyncio.to_thread(self._found, wanted)
        if found is not None:
            return ImageReply(export=found)
        job = self._jobs.get(wanted.id)
        if job is None:
            self._forget_done()
            if len(self._jobs) >= QUEUE_MAX:
                raise CapacityExhausted(f"{QUEUE_MAX} exports are under way", field=FIELD)
            job = self._jobs[wanted.id] = _Job(
                asyncio.create_task(self._make(wanted), name="export"), threading.Event()
            )
        await asyncio.sleep(0)
        if not job.task.done():
            return ImageReply(progress=job.share, stage="exporting")
        self._jobs.pop(wanted.id, None)
        return ImageReply(export=job.task.result())

    def _forget_done(self) -> None:
        """Work whose outcome nobody asked for: what it made is found as a file."""
        for id in [id for id, job in self._jobs.items() if job.task.done()]:
            self._jobs.pop(id).task.exception()

    def piece(self, project: str, ask: BlobGet) -> bytes:
        """Bytes of a finished export; blocks. Raises ``NotFound``."""
        try:
            with self._path(project, ask.id).open("rb") as file, disk_errors():
                return os.pread(file.fileno(), ask.length, ask.offset)
        except FileNotFoundError as error:
            raise NotFound(f"there is no export {ask.id}", field=FIELD) from error

    async def close(self) -> None:
        """Ends what is under way."""
        for job in self._jobs.values():
            job.cancelled.set()
        await asyncio.gather(*(job.task for job in self._jobs.values()), return_exceptions=True)
        self._thread.shutdown()

    def sweep(self) -> int:
        """Removes old exports and what a crash left; returns how many."""
        return swept(self.folder, self.keep_s)

    def _path(self, project: str, id: str) -> Path:
        return self.folder / hashlib.sha256(f"{project}/{id}".encode()).hexdigest()

    def _found(self, wanted: Environment) -> Blob | None:
        path = self._path(wanted.project, wanted.id)
        facts = path.with_suffix(".json")
        try:
            blob = msgspec.json.decode(facts.read_bytes(), type=Blob)
            if path.stat().st_size != blob.size_bytes:
                return None
            os.utime(path)  # somebody wants it: it is new again
            os.utime(facts)
        except (FileNotFoundError, msgspec.MsgspecError):
            return None
        return blob

    async def _make(self, wanted: Environment) -> Blob:
        job = self._jobs[wanted.id]
        holder = f"export/{wanted.id}"
        manifests = [
            await asyncio.to_thread(self.store.manifest, digest) for digest in wanted.layers
        ]
        job.total_bytes = sum(one.data_bytes for one in manifests)
        await self.keep(holder, manifests)
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._thread, self._write, wanted, job)
        except (DsecError, Cancelled):
            raise
        except Exception as error:
            raise Internal(f"{type(error).__name__} while exporting: {error}") from error
        finally:
            await self.release(holder)

    def _write(self, wanted: Environment, job: _Job) -> Blob:
        path = self._path(wanted.project, wanted.id)
        with disk_errors():
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            room = self.total_bytes_max - held_bytes(self.folder)
            _check_room(job.total_bytes, room)
            with tempfile.TemporaryDirectory(dir=self.folder) as work:
                made = Path(work) / "archive"

                def tick(done: int) -> None:
                    job.tick(done)
                    _check_room(made.stat().st_size, room)

                with made.open("w+b") as out:
                    write_archive(
                        out, wanted.layers, wanted.config, name=wanted.name, tick=tick,
                        opened=lambda digest: opened_layer(
                            self.store, digest, Path(work), tick=job.tick
                        ),
                    )  # fmt: skip
                    out.seek(0)
                    sha256 = hashlib.file_digest(out, "sha256").hexdigest()
                blob = Blob(id=wanted.id, size_bytes=made.stat().st_size, sha256=sha256)
                made.rename(path)
                facts = Path(work) / "facts"
                facts.write_bytes(msgspec.json.encode(blob))
                facts.rename(path.with_suffix(".json"))
        return blob


def _check_room(size: int, room: int) -> None:
    if size > room:
        raise CapacityExhausted(f"no room for an export of {size} bytes", field=FIELD)
