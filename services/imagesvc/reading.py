"""From a source to the trees that are stored.

Owns: recognising what a source is, its layers in order, their place in a sandbox. Does
not own: writing them (``importer``), what each format means (its own module).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from schemas.sandbox import ImageConfig
from services.imagesvc import gitlayer
from services.imagesvc.archive import DirectoryMembers, TarMembers, find_image
from services.imagesvc.meter import Meter
from services.imagesvc.ociimage import ArchiveImage
from services.imagesvc.sources import (
    BuildSource,
    DockerSource,
    GitSource,
    ImportRequest,
    PathSource,
    RegistrySource,
)
from services.imagesvc.spool import Spool
from services.imagesvc.tarlayer import FileRange, read_tar
from shared.erofs.collapse import COLLAPSE_MAX_BYTES, Collapser
from shared.erofs.dirlayer import DirectoryLayer
from shared.erofs.layertree import Inode, nested, owned_by, unique_inodes
from shared.errors import InvalidRequest, Unsupported

Trees = tuple[list[Inode], ImageConfig]
"""Bottom first, and the image's defaults."""


@dataclass(frozen=True, slots=True)
class ImportLimits:
    """Bounds of one import."""

    entries_max: int = 2_000_000  # per layer
    unpacked_bytes_max: int = 256 * 1024**3  # spooled streams and stored data, each
    collapse_bytes_max: int = COLLAPSE_MAX_BYTES
    seconds_max: float = 4 * 3_600.0  # from its beginning until its layers are written
    parallel_max: int = 2
    small_bytes: int = 64 * 1024**2  # a source of at most so much has a thread of its own kind


class ImageEngine(Protocol):
    """A container engine that can build and save images."""

    def save(self, reference: str, *, built: bool = False) -> Iterator[bytes]: ...

    def build(
        self, context: Path, *, dockerfile: str, target: str | None, tick: Callable[[int], None]
    ) -> str:
        """The id of a new image, to be removed by :meth:`remove`."""
        ...

    def remove(self, image: str) -> None: ...


class ImageRegistries(Protocol):
    """A client of registries."""

    def image(self, source: RegistrySource, spool: Spool, meter: Meter) -> ArchiveImage: ...


@dataclass(slots=True)
class Reading:
    """Turns one source into the trees to store; open until their contents are written."""

    request: ImportRequest
    limits: ImportLimits
    work: Path
    spool: Spool = field(kw_only=True)
    stack: ExitStack = field(kw_only=True)
    meter: Meter = field(kw_only=True)
    engine: ImageEngine | None = field(kw_only=True)
    registries: ImageRegistries | None = field(kw_only=True)
    _directory: DirectoryLayer | None = None

    def read(self) -> Trees:
        """The source's trees, where the request wants them."""
        roots, config = self._read()
        return [_placed(root, self.request) for root in roots], config

    def confirm(self) -> None:
        """Raises ``Conflict`` where a directory changed meanwhile."""
        if self._directory is not None:
            self._directory.confirm()

    def _read(self) -> Trees:
        source = self.request.source
        if isinstance(source, GitSource):
            return self._git(source)
        if isinstance(source, DockerSource):
            return self._saved(self._the_engine().save(source.reference), "docker")
        if isinstance(source, RegistrySource):
            return self._registry(source)
        if isinstance(source, BuildSource):
            return self._build(source)
        mode = _mode(source.path)
        if stat.S_ISDIR(mode):
            return self._directory_source(source)
        if stat.S_ISREG(mode):
            return self._file(source)
        raise InvalidRequest(f"{source.path} is neither a file nor a directory", field="path")

    def _git(self, source: GitSource) -> Trees:
        checkout = self.work / "checkout"
        time_s = gitlayer.rebuild(
            source.path, source.commit, checkout, entries_max=self.limits.entries_max,
            bytes_max=self.limits.unpacked_bytes_max,
        )  # fmt: skip
        roots, config = self._tree(checkout)
        for _, inode in unique_inodes(roots[0]):
            inode.mtime_ns = time_s * 1_000_000_000
        return roots, config

    def _the_engine(self, name: str = "docker") -> ImageEngine:
        if self.engine is None:
            raise Unsupported("no container engine is configured", field=name)
        return self.engine

    def _saved(self, pieces: Iterator[bytes], name: str) -> Trees:
        archive = self.spool.store(pieces, field=name)
        image = find_image(TarMembers.read(archive), self.spool)
        if image is None:
            raise InvalidRequest("the engine sent something that is no image", field=name)
        return self._image(image)

    def _registry(self, source: RegistrySource) -> Trees:
        if self.registries is None:
            raise Unsupported("no registries are configured", field="registry")
        return self._image(self.registries.image(source, self.spool, self.meter))

    def _build(self, source: BuildSource) -> Trees:
        engine = self._the_engine("dockerfile")
        self.meter.start("building", 0)
        built = engine.build(
            source.path, dockerfile=source.dockerfile, target=source.target,
            tick=self.meter.advance,
        )  # fmt: skip
        try:
            return self._saved(engine.save(built, built=True), "dockerfile")
        finally:
            engine.remove(built)

    def _directory_source(self, source: PathSource) -> Trees:
        fd = self.spool.keep_open(os.open(source.path, os.O_RDONLY | os.O_DIRECTORY))
        members = DirectoryMembers(fd, self.spool)
        if source.form != "tree" and members.get("oci-layout") is not None:
            image = find_image(members, self.spool, reference=source.reference)
            if image is not None:
                return self._image(image)
        if source.form == "image":
            raise InvalidRequest(f"{source.path} is no OCI layout", field="path")
        return self._tree(source.path)

    def _tree(self, path: Path) -> Trees:
        layer = DirectoryLayer(path, entries_max=self.limits.entries_max)
        self._directory = self.stack.enter_context(layer)
        return self._collapsed([layer.tree.root]), ImageConfig()

    def _file(self, source: PathSource) -> Trees:
        try:
            fd = os.open(source.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise InvalidRequest(f"{source.path}: {error.strerror}", field="path") from error
        size = os.fstat(self.spool.keep_open(fd)).st_size
        archive = self.spool.plain(FileRange(fd, 0, size))
        image = None
        if source.form != "tree":
            image = find_image(TarMembers.read(archive), self.spool, reference=source.reference)
        if image is None and source.form == "image":
            raise InvalidRequest("neither an OCI layout nor a saved image", field="archive")
        return self._image(image or ArchiveImage([archive], ImageConfig()))

    def _image(self, image: ArchiveImage) -> Trees:
        collapser = self._collapser()
        try:
            for layer in image.layers:
                tree = read_tar(layer, lower=collapser.view, entries_max=self.limits.entries_max)
                collapser.add(tree.root)
        finally:
            self.spool.confirm()  # a layer with another digest is told as such, whatever it has
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


def _mode(path: Path) -> int:
    try:
        return path.stat().st_mode
    except OSError as error:
        raise InvalidRequest(f"{path}: {error.strerror}", field="path") from error
