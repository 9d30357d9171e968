"""Layers in a local or shared folder.

Owns: the folder's layout, atomic appearance by rename. Does not own: references, what may
go. Layout: ``<root>/layers/<digest>/…`` as in :mod:`shared.blobs.layout`, and
``<root>/tmp/<random>/`` for work in progress, locked by its owner.
"""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from shared.blobs import layout
from shared.blobs.base import Incoming
from shared.blobs.layout import (
    CHUNKS_NAME,
    DATA_NAME,
    MANIFEST_NAME,
    META_NAME,
    LayerFiles,
    LayerManifest,
)
from shared.blobs.scratch import Scratch, disk_errors
from shared.errors import InvalidRequest, NotFound


@dataclass(frozen=True, slots=True)
class LayerPaths:
    """A layer's files in a folder store; ``data`` is ``None`` where there is no blob."""

    meta: Path
    data: Path | None
    chunks: Path | None


class FolderStore:
    """:class:`~shared.blobs.base.BlobStore` on a local or shared file system."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._layers = root / "layers"
        with disk_errors():
            self._layers.mkdir(parents=True, exist_ok=True)
        self._scratch = Scratch(root / "tmp")

    def workspace(self) -> AbstractContextManager[Path]:
        return self._scratch.workspace()

    def put_layer(self, files: LayerFiles) -> LayerManifest:
        manifest = files.manifest()
        folder = files.meta_path.parent
        if not self._scratch.holds(folder):
            raise InvalidRequest("layers are put from a directory of the store's workspace")
        with disk_errors():
            (folder / MANIFEST_NAME).write_bytes(msgspec.json.encode(manifest))
            for path in folder.iterdir():
                path.chmod(0o444)
                _sync(path)
            folder.chmod(0o755)
            _sync(folder)
            self._publish(folder, files.digest)
        return manifest

    @contextmanager
    def incoming(self) -> Iterator[Incoming]:
        with self.workspace() as work:
            folder = work / "layer"
            folder.mkdir()
            yield Incoming(work.name, folder=folder)

    def adopt(self, manifest: LayerManifest, incoming: Incoming) -> LayerManifest:
        if incoming.folder is None:
            raise InvalidRequest("not a place of this store")
        with disk_errors():
            files = layout.files_in(incoming.folder, manifest)
        return self.put_layer(files)

    def _publish(self, folder: Path, digest: str) -> None:
        try:
            folder.rename(self._layers / digest)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            shutil.rmtree(folder)  # the same content is there already
        _sync(self._layers)

    def hint(self, digest: str, first: Sequence[int]) -> None:
        """Nodes mount layers from the folder: they fetch nothing."""

    def has(self, digest: str) -> bool:
        return self._path(digest, MANIFEST_NAME).exists()

    def manifest(self, digest: str) -> LayerManifest:
        with self.open(digest, MANIFEST_NAME) as file:
            return layout.read_manifest(file.read(), digest)

    def open(self, digest: str, name: str) -> BinaryIO:
        """One of the layer's files for reading; raises :class:`NotFound`."""
        try:
            with disk_errors():
                return open(self._path(digest, name), "rb")
        except FileNotFoundError as error:
            raise NotFound(f"layer {digest} has no {name}", field="digest") from error

    def paths(self, digest: str) -> LayerPaths:
        has_data = self.manifest(digest).data_bytes > 0
        return LayerPaths(
            meta=self._path(digest, META_NAME),
            data=self._path(digest, DATA_NAME) if has_data else None,
            chunks=self._path(digest, CHUNKS_NAME) if has_data else None,
        )

    async def fetch_manifest(self, digest: str) -> LayerManifest:
        return await asyncio.to_thread(self.manifest, digest)

    async def fetch(self, digest: str, name: str, start: int, length: int) -> bytes:
        return await asyncio.to_thread(self._read, digest, name, start, length)

    def _read(self, digest: str, name: str, start: int, length: int) -> bytes:
        with self.open(digest, name) as file, disk_errors():
            return os.pread(file.fileno(), length, start)

    def delete(self, digest: str) -> bool:
        """Gone at once for new readers; those who have the files open read on."""
        folder = self._path(digest, MANIFEST_NAME).parent
        with self.workspace() as work:
            try:
                folder.rename(work / digest)
            except FileNotFoundError:
                return False
            _sync(self._layers)
        return True

    def list(self) -> Iterator[str]:
        for entry in sorted(self._layers.iterdir()):
            if layout.is_digest(entry.name):
                yield entry.name

    def sweep(self) -> int:
        return self._scratch.sweep()

    def ready(self) -> bool:
        return self._scratch.ready() and os.access(self._layers, os.W_OK)

    def _path(self, digest: str, name: str) -> Path:
        return self.root / layout.key(digest, name)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
