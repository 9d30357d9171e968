"""Where layers are kept: one interface, and a local or shared folder behind it.

Owns: the folder's layout, atomic appearance of layers, sweeping of what a crash
left. Does not own: names and references (the database), which layers may go.

Layout of ``file:///root``::

    layers/<digest>/meta.erofs      metadata image; its SHA-256 is the digest
    layers/<digest>/data.blob       contents (absent where all are in the metadata)
    layers/<digest>/chunks.sha256   32 bytes per 256 KiB of data.blob
    layers/<digest>/manifest.json   :class:`LayerManifest`
    tmp/<random>/                   work in progress, locked by its owner
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol
from urllib.parse import unquote, urlsplit

import msgspec

from services.imagesvc.datablob import DATA_CHUNK_BYTES
from services.imagesvc.erofs import CHUNKS_NAME, DATA_NAME, META_NAME, LayerFiles
from shared.errors import InvalidRequest, NotFound, Unavailable, Unsupported

MANIFEST_NAME = "manifest.json"
MANIFEST_VERSION = 1
_DIGEST = re.compile(r"[0-9a-f]{64}")


class LayerManifest(msgspec.Struct, frozen=True):
    """What a node must know to fetch, check and mount a layer. Sizes in bytes."""

    digest: str
    meta_bytes: int
    data_bytes: int
    data_digest: str
    entries: int
    data_chunk_bytes: int = DATA_CHUNK_BYTES
    version: int = MANIFEST_VERSION

    @property
    def size_bytes(self) -> int:
        return self.meta_bytes + self.data_bytes


@dataclass(frozen=True, slots=True)
class LayerPaths:
    """A layer's files in a folder store; ``data`` is ``None`` where there is no blob."""

    meta: Path
    data: Path | None
    chunks: Path | None


class BlobStore(Protocol):
    """Immutable layers by digest. All calls block; errors are typed."""

    def workspace(self) -> AbstractContextManager[Path]:
        """A private empty directory, gone when the context ends, from which layers are put."""
        ...

    def put_layer(self, files: LayerFiles) -> LayerManifest:
        """Take over finished files; visible at once and whole. Putting twice is harmless."""
        ...

    def has(self, digest: str) -> bool: ...

    def manifest(self, digest: str) -> LayerManifest:
        """Raises :class:`NotFound`."""
        ...

    def open(self, digest: str, name: str) -> BinaryIO:
        """One of the layer's files for reading; raises :class:`NotFound`."""
        ...

    def paths(self, digest: str) -> LayerPaths: ...

    def delete(self, digest: str) -> bool:
        """Remove a layer; ``False`` where it was not there."""
        ...

    def list(self) -> Iterator[str]: ...

    def sweep(self) -> int:
        """Remove what crashed imports left; returns how many."""
        ...

    def ready(self) -> bool:
        """Whether layers can be put."""
        ...


def open_store(url: str) -> FolderStore:
    """The store at ``url`` (``file:///…``); made where it is missing."""
    parts = urlsplit(url)
    if parts.scheme != "file" or parts.netloc not in ("", "localhost"):
        raise Unsupported(f"store {url!r}: only file:/// is supported", field="store")
    path = Path(unquote(parts.path))
    if not path.is_absolute() or path == Path("/"):
        raise InvalidRequest(f"store {url!r} needs an absolute folder", field="store")
    return FolderStore(path)


@contextmanager
def disk_errors() -> Iterator[None]:
    """A full or broken disk as :class:`Unavailable`."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise Unavailable(f"the layer store is full: {error.strerror}") from error
        if error.errno in (errno.EIO, errno.EROFS, errno.ESTALE):
            raise Unavailable(f"the layer store fails: {error.strerror}") from error
        raise


class FolderStore:
    """:class:`BlobStore` on a local or shared file system."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._layers = root / "layers"
        self._tmp = root / "tmp"
        with disk_errors():
            self._layers.mkdir(parents=True, exist_ok=True)
            self._tmp.mkdir(mode=0o700, exist_ok=True)

    @contextmanager
    def workspace(self) -> Iterator[Path]:
        path, fd = self._locked_directory()
        try:
            with disk_errors():
                yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)
            os.close(fd)

    def _locked_directory(self) -> tuple[Path, int]:
        """A new directory with its lock; another one where a sweep took it in between."""
        while True:
            with disk_errors():
                path = Path(tempfile.mkdtemp(dir=self._tmp))
                with suppress(FileNotFoundError):
                    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                    fcntl.flock(fd, fcntl.LOCK_EX)
                    if path.exists():
                        return path, fd
                    os.close(fd)

    def put_layer(self, files: LayerFiles) -> LayerManifest:
        manifest = LayerManifest(
            digest=files.digest,
            meta_bytes=files.meta_bytes,
            data_bytes=files.data_bytes,
            data_digest=files.data_digest,
            entries=files.entries,
        )
        folder = files.meta_path.parent
        if folder.parent.parent != self._tmp:
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

    def _publish(self, folder: Path, digest: str) -> None:
        try:
            folder.rename(self._layers / digest)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            shutil.rmtree(folder)  # the same content is there already
        _sync(self._layers)

    def has(self, digest: str) -> bool:
        return (self._folder(digest) / MANIFEST_NAME).exists()

    def manifest(self, digest: str) -> LayerManifest:
        with self.open(digest, MANIFEST_NAME) as file:
            return msgspec.json.decode(file.read(), type=LayerManifest)

    def open(self, digest: str, name: str) -> BinaryIO:
        if name not in (META_NAME, DATA_NAME, CHUNKS_NAME, MANIFEST_NAME):
            raise InvalidRequest(f"a layer has no file {name!r}", field="name")
        try:
            with disk_errors():
                return open(self._folder(digest) / name, "rb")
        except FileNotFoundError as error:
            raise NotFound(f"layer {digest} has no {name}", field="digest") from error

    def paths(self, digest: str) -> LayerPaths:
        has_data = self.manifest(digest).data_bytes > 0
        folder = self._folder(digest)
        return LayerPaths(
            meta=folder / META_NAME,
            data=folder / DATA_NAME if has_data else None,
            chunks=folder / CHUNKS_NAME if has_data else None,
        )

    def delete(self, digest: str) -> bool:
        """Gone at once for new readers; those who have the files open read on."""
        with self.workspace() as work:
            try:
                self._folder(digest).rename(work / digest)
            except FileNotFoundError:
                return False
            _sync(self._layers)
        return True

    def list(self) -> Iterator[str]:
        for entry in sorted(self._layers.iterdir()):
            if _DIGEST.fullmatch(entry.name):
                yield entry.name

    def sweep(self) -> int:
        swept = 0
        for path in list(self._tmp.iterdir()):
            with suppress(FileNotFoundError):
                swept += _remove_if_unowned(path)
        return swept

    def ready(self) -> bool:
        return os.access(self._tmp, os.W_OK) and os.access(self._layers, os.W_OK)

    def _folder(self, digest: str) -> Path:
        if not _DIGEST.fullmatch(digest):
            raise InvalidRequest(f"{digest!r} is not a layer digest", field="digest")
        return self._layers / digest


def _remove_if_unowned(path: Path) -> bool:
    """Remove a work directory unless a living process holds its lock."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    else:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
        return True
    finally:
        os.close(fd)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
