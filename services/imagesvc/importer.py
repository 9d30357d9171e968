"""An image, workspace or toolkit from its source into the store.

Owns: the order of things: recognise the source, read its layers, collapse them,
place them, write, check and store them; limits, progress, cancellation. Does not
own: names and who may import what.
"""

from __future__ import annotations

import asyncio
import os
import stat
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, Protocol

from schemas.image import Kind
from schemas.sandbox import ImageConfig
from services.imagesvc import gitlayer
from services.imagesvc.archive import ArchiveImage, DirectoryMembers, TarMembers, find_image
from services.imagesvc.spool import Spool
from services.imagesvc.tarlayer import FileRange, read_tar
from shared.blobs.base import BlobStore
from shared.blobs.layout import LayerFiles, LayerManifest
from shared.erofs.collapse import COLLAPSE_MAX_BYTES, Collapser
from shared.erofs.dirlayer import DirectoryLayer
from shared.erofs.layertree import Inode, nested, owned_by, stored_bytes, unique_inodes
from shared.erofs.writer import build_layer
from shared.errors import InvalidRequest, Unsupported

Stage = Literal["reading", "writing", "storing"]
SMALL_ENTRIES = 2_000
"""Entries that are looked at to find out whether a source is small."""
REPORT_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class PathSource:
    """A directory, a layer tar (plain or compressed), a ``docker save`` archive or an OCI layout.

    ``reference`` chooses one image of an archive with several.
    """

    path: Path
    reference: str | None = None


@dataclass(frozen=True, slots=True)
class DockerSource:
    """An image of the local container engine."""

    reference: str


@dataclass(frozen=True, slots=True)
class GitSource:
    """A local git repository, rebuilt at ``commit`` without what came after it."""

    path: Path
    commit: str = "HEAD"


Source = PathSource | DockerSource | GitSource


@dataclass(frozen=True, slots=True)
class ImportRequest:
    """What to import and where it goes in a sandbox.

    ``prefix``: absolute path at which the source's root appears. ``owner``:
    ``(uid, gid)`` for all entries instead of the source's.
    """

    source: Source
    kind: Kind = "base"
    prefix: str = "/"
    owner: tuple[int, int] | None = None


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


@dataclass(frozen=True, slots=True)
class ImportProgress:
    """``total_bytes`` is 0 until the source was read."""

    stage: Stage
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class ImportLimits:
    """Bounds of one import."""

    entries_max: int = 2_000_000  # per layer
    unpacked_bytes_max: int = 256 * 1024**3  # spooled streams and stored data, each
    collapse_bytes_max: int = COLLAPSE_MAX_BYTES
    parallel_max: int = 2
    small_bytes: int = 64 * 1024**2  # a source of at most so much has a thread of its own kind


def is_small(source: Source, limit: int) -> bool:
    """Whether a look at a folder or file, of SMALL_ENTRIES entries at most, shows no
    more than ``limit`` bytes."""
    if not isinstance(source, PathSource):
        return False
    total = 0
    try:
        if not source.path.is_dir():
            return source.path.stat().st_size <= limit
        files = (os.path.join(at, n) for at, _, names in os.walk(source.path) for n in names)
        for count, file in enumerate(files):
            total += os.lstat(file).st_size
            if total > limit or count >= SMALL_ENTRIES:
                return False
    except OSError:  # the import itself will say what is wrong
        return False
    return True


class ImageEngine(Protocol):
    """A container engine that can save an image."""

    def save(self, reference: str) -> Iterator[bytes]: ...


class Importer:
    """Imports into ``store``; ``engine`` serves :class:`DockerSource`."""

    def __init__(
        self,
        store: BlobStore,
        *,
        engine: ImageEngine | None = None,
        limits: ImportLimits | None = None,
        verify: bool = True,
    ) -> None:
        self._store = store
        self._engine = engine
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
                raise _Cancelled
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

        Raises :class:`InvalidRequest`, :class:`Unsupported`, ``NotFound``,
        ``Conflict`` (the source changed), ``Unavailable`` (disk, engine) or
        ``Internal`` (the result differs from the source); nothing is stored then.
        """
        if cancelled():
            raise _Cancelled
        meter = _Meter(progress, cancelled)
        with self._store.workspace() as work, ExitStack() as stack:
            spool = stack.enter_context(
                Spool(work, bytes_max=self._limits.unpacked_bytes_max, progress=meter.advance)
            )
            reading = _Reading(request, self._limits, self._engine, work, spool, stack)
            roots, config = reading.read()
            roots = [_placed(root, request) for root in roots]
            meter.start("writing", sum(stored_bytes(root) for root in roots))
            if meter.total_bytes > self._limits.unpacked_bytes_max:
                raise InvalidRequest(
                    f"{meter.total_bytes} bytes; the limit is {self._limits.unpacked_bytes_max}",
                    field="path",
                )
            built = []
            for number, root in enumerate(roots):
                folder = work / f"layer{number}"
                folder.mkdir()
                built.append(build_layer(root, folder, verify=self._verify, progress=meter.advance))
            reading.confirm()
            meter.start("storing", meter.total_bytes)
            keep(built)
            stored = [self._store.put_layer(files) for files in built]
        return ImportResult(stored, config)

    def close(self) -> None:
        """Wait for running imports and release the threads."""
        self._pool.shutdown()
        self._small.shutdown()


class _Cancelled(Exception):
    """The caller no longer wants the result."""


@dataclass(slots=True)
class _Meter:
    """Counts bytes and passes them on in steps of :data:`REPORT_BYTES`."""

    report: Callable[[ImportProgress], None] | None
    cancelled: Callable[[], bool]
    stage: Stage = "reading"
    done_bytes: int = 0
    total_bytes: int = 0
    _reported: int = 0

    def start(self, stage: Stage, total_bytes: int) -> None:
        self.stage, self.total_bytes = stage, total_bytes
        self._send()

    def advance(self, done: int) -> None:
        if self.cancelled():
            raise _Cancelled
        self.done_bytes += done
        if self.done_bytes - self._reported >= REPORT_BYTES:
            self._send()

    def _send(self) -> None:
        self._reported = self.done_bytes
        if self.report is not None:
            self.report(ImportProgress(self.stage, self.done_bytes, self.total_bytes))


def _placed(root: Inode, request: ImportRequest) -> Inode:
    """The tree where the request wants it.

    A workspace or toolkit at ``/`` must not give the sandbox's root directory
    the mode and owner of the folder that it happened to be made in.
    """
    if request.owner is not None:
        owned_by(root, *request.owner)
    if request.prefix != "/":
        return nested(root, request.prefix)
    if request.kind != "base":
        root.mode, root.uid, root.gid = stat.S_IFDIR | 0o755, 0, 0
    return root


@dataclass(slots=True)
class _Reading:
    """Turns one source into the trees to store; open until their contents are written."""

    request: ImportRequest
    limits: ImportLimits
    engine: ImageEngine | None
    work: Path
    spool: Spool
    stack: ExitStack
    _directory: DirectoryLayer | None = field(default=None)

    def read(self) -> tuple[list[Inode], ImageConfig]:
        source = self.request.source
        if isinstance(source, GitSource):
            return self._git(source)
        if isinstance(source, DockerSource):
            return self._docker(source)
        mode = _mode(source.path)
        if stat.S_ISDIR(mode):
            return self._directory_source(source)
        if stat.S_ISREG(mode):
            return self._file(source)
        raise InvalidRequest(f"{source.path} is neither a file nor a directory", field="path")

    def confirm(self) -> None:
        if self._directory is not None:
            self._directory.confirm()

    def _git(self, source: GitSource) -> tuple[list[Inode], ImageConfig]:
        checkout = self.work / "checkout"
        time_s = gitlayer.rebuild(source.path, source.commit, checkout)
        roots, config = self._tree(checkout)
        for _, inode in unique_inodes(roots[0]):
            inode.mtime_ns = time_s * 1_000_000_000
        return roots, config

    def _docker(self, source: DockerSource) -> tuple[list[Inode], ImageConfig]:
        if self.engine is None:
            raise Unsupported("no container engine is configured", field="docker")
        archive = self.spool.store(self.engine.save(source.reference), field="docker")
        image = find_image(TarMembers.read(archive), self.spool)
        if image is None:
            raise InvalidRequest("the engine sent something that is no image", field="docker")
        return self._image(image)

    def _directory_source(self, source: PathSource) -> tuple[list[Inode], ImageConfig]:
        fd = self.spool.keep_open(os.open(source.path, os.O_RDONLY | os.O_DIRECTORY))
        members = DirectoryMembers(fd, self.spool)
        if members.get("oci-layout") is not None:
            image = find_image(members, self.spool, reference=source.reference)
            if image is not None:
                return self._image(image)
        return self._tree(source.path)

    def _tree(self, path: Path) -> tuple[list[Inode], ImageConfig]:
        layer = DirectoryLayer(path, entries_max=self.limits.entries_max)
        self._directory = self.stack.enter_context(layer)
        return self._collapsed([layer.tree.root]), ImageConfig()

    def _file(self, source: PathSource) -> tuple[list[Inode], ImageConfig]:
        try:
            fd = os.open(source.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise InvalidRequest(f"{source.path}: {error.strerror}", field="path") from error
        size = os.fstat(self.spool.keep_open(fd)).st_size
        archive = self.spool.plain(FileRange(fd, 0, size))
        image = find_image(TarMembers.read(archive), self.spool, reference=source.reference)
        if image is None:
            image = ArchiveImage([archive], ImageConfig())
        return self._image(image)

    def _image(self, image: ArchiveImage) -> tuple[list[Inode], ImageConfig]:
        collapser = self._collapser()
        for layer in image.layers:
            tree = read_tar(layer, lower=collapser.view, entries_max=self.limits.entries_max)
            collapser.add(tree.root)
        return collapser.finish(), image.config

    def _collapsed(self, roots: list[Inode]) -> list[Inode]:
        collapser = self._collapser()
        for root in roots:
            collapser.add(root)
        return collapser.finish()

    def _collapser(self) -> Collapser:
        return Collapser(
            below_unknown=self.request.kind != "base",
            threshold_bytes=self.limits.collapse_bytes_max,
        )


def _mode(path: Path) -> int:
    try:
        return path.stat().st_mode
    except OSError as error:
        raise InvalidRequest(f"{path}: {error.strerror}", field="path") from error
