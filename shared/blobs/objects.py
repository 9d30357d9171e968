"""Layers in an S3-compatible object store.

Owns: keys, the order of uploads, bounds of retries and memory, translation of the
library's errors. Does not own: references, what may go, caching. Objects appear one by
one, so the manifest goes last and is removed first: a layer is there when its manifest is.
Uploads that a crash cut leave parts that no listing shows; the bucket's lifecycle rule for
incomplete uploads removes them.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import obstore
from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError
from obstore.store import S3Store

from shared.blobs import layout
from shared.blobs.base import Content, Incoming
from shared.blobs.layout import (
    CHUNKS_NAME,
    DATA_NAME,
    MANIFEST_NAME,
    META_NAME,
    LayerFiles,
    LayerManifest,
)
from shared.blobs.scratch import Scratch
from shared.errors import Internal, NotFound, Unavailable

RETRIES = 3
RETRY_TOTAL_S = 30.0
BACKOFF_FIRST_S, BACKOFF_MAX_S = 0.05, 2.0
CONNECT_S = 5.0
REQUEST_S = 60.0
UPLOAD_PART_BYTES = 8 * 1024 * 1024
UPLOAD_PARTS_AT_ONCE = 4
"""Times the part's size: the memory of one upload."""
LISTED_AT_ONCE = 1000
SAID_MAX = 300
UPLOAD_S = 3_600.0
"""How long a node may take to put a layer's files."""
_UPLOADED = (META_NAME, DATA_NAME, CHUNKS_NAME)


class ObjectStore:
    """:class:`~shared.blobs.base.BlobStore` over S3; ``scratch`` is a local folder.

    ``config``: the library's names (``endpoint``, ``region``, ``access_key_id``,
    ``secret_access_key`` …); what is missing comes from the machine's environment.
    """

    def __init__(
        self, bucket: str, *, prefix: str, config: dict[str, Any], scratch: Path | None,
        retries: int = RETRIES, request_s: float = REQUEST_S,
    ) -> None:  # fmt: skip
        self._name = f"s3://{bucket}/{prefix}".rstrip("/")
        self._scratch = scratch
        options = {"allow_http": True, "timeout": timedelta(seconds=request_s)}
        options["connect_timeout"] = timedelta(seconds=min(CONNECT_S, request_s))
        with _errors(self._name):
            self._objects = S3Store(
                bucket, prefix=prefix or None, client_options=options,  # type: ignore[arg-type]
                retry_config={
                    "max_retries": retries,
                    "retry_timeout": timedelta(seconds=RETRY_TOTAL_S),
                    "backoff": {
                        "base": 2,
                        "init_backoff": timedelta(seconds=BACKOFF_FIRST_S),
                        "max_backoff": timedelta(seconds=BACKOFF_MAX_S),
                    },
                },
                **config,
            )  # fmt: skip

    def workspace(self) -> AbstractContextManager[Path]:
        return self._local.workspace()

    @property
    def _local(self) -> Scratch:
        if self._scratch is None:
            raise Internal("this store was opened for reading")
        return Scratch(self._scratch)

    def put_layer(self, files: LayerFiles) -> LayerManifest:
        manifest = files.manifest()
        if self.has(files.digest):
            return manifest
        paths = {META_NAME: files.meta_path, DATA_NAME: files.data_path}
        paths[CHUNKS_NAME] = files.chunks_path
        for name, path in paths.items():
            if path is not None:
                self._put(layout.key(files.digest, name), path)
        self._put(layout.key(files.digest, MANIFEST_NAME), msgspec.json.encode(manifest))
        return manifest

    @contextmanager
    def incoming(self) -> Iterator[Incoming]:
        token = secrets.token_hex(16)
        keys = {name: f"incoming/{token}/{name}" for name in _UPLOADED}
        with _errors(self._name):
            signed = {
                name: obstore.sign(self._objects, "PUT", key, timedelta(seconds=UPLOAD_S))
                for name, key in keys.items()
            }
        try:
            yield Incoming(token, urls=signed)
        finally:
            with suppress(Unavailable, NotFound), _errors(self._name):
                obstore.delete(self._objects, list(keys.values()))

    def adopt(self, manifest: LayerManifest, incoming: Incoming) -> LayerManifest:
        if self.has(manifest.digest):
            return manifest
        place = f"incoming/{incoming.token}"
        names = _UPLOADED if manifest.data_bytes else (META_NAME,)
        try:
            with _errors(self._name):
                layout.check_meta(manifest, self._whole(f"{place}/{META_NAME}"))
                if manifest.data_bytes:
                    layout.check_chunks(manifest, self._whole(f"{place}/{CHUNKS_NAME}"))
                    size = obstore.head(self._objects, f"{place}/{DATA_NAME}")["size"]
                    if size != manifest.data_bytes:
                        raise layout.damaged(manifest.digest, "its data has another size")
                for name in names:
                    key = layout.key(manifest.digest, name)
                    obstore.copy(self._objects, f"{place}/{name}", key)
        except NotFound as error:
            raise layout.damaged(manifest.digest, "a file is missing") from error
        self._put(layout.key(manifest.digest, MANIFEST_NAME), msgspec.json.encode(manifest))
        return manifest

    def hint(self, digest: str, first: Sequence[int]) -> None:
        with suppress(NotFound):
            manifest = self.manifest(digest)
            wanted = layout.hinted(manifest, first)
            if wanted != manifest:
                self._put(layout.key(digest, MANIFEST_NAME), msgspec.json.encode(wanted))

    def _whole(self, key: str) -> bytes:
        return bytes(obstore.get(self._objects, key).bytes())

    def _put(self, key: str, content: Path | bytes) -> None:
        with _errors(self._name):
            obstore.put(
                self._objects, key, content, chunk_size=UPLOAD_PART_BYTES,
                max_concurrency=UPLOAD_PARTS_AT_ONCE,
            )  # fmt: skip

    def has(self, digest: str) -> bool:
        with suppress(NotFound), _errors(self._name, digest):
            obstore.head(self._objects, layout.key(digest, MANIFEST_NAME))
            return True
        return False

    def manifest(self, digest: str) -> LayerManifest:
        with _errors(self._name, digest):
            found = obstore.get(self._objects, layout.key(digest, MANIFEST_NAME)).bytes()
        return layout.read_manifest(bytes(found), digest)

    async def fetch_manifest(self, digest: str) -> LayerManifest:
        found = await self.fetch(digest, MANIFEST_NAME, 0, layout.MANIFEST_BYTES_MAX)
        return layout.read_manifest(bytes(found), digest)

    async def fetch(self, digest: str, name: str, start: int, length: int) -> Content:
        with _errors(self._name, digest):
            found = await obstore.get_range_async(
                self._objects, layout.key(digest, name), start=start, length=length
            )
        return memoryview(found)  # of the library's memory: no copy

    def delete(self, digest: str) -> bool:
        prefix = layout.key(digest, MANIFEST_NAME).removesuffix(MANIFEST_NAME)
        with _errors(self._name):
            listing = obstore.list(self._objects, prefix, chunk_size=LISTED_AT_ONCE)
            keys = [one["path"] for page in listing for one in page]
            for key in sorted(keys, key=lambda key: not key.endswith(MANIFEST_NAME)):
                with suppress(FileNotFoundError):
                    obstore.delete(self._objects, key)
        return bool(keys)

    def list(self) -> Iterator[str]:
        with _errors(self._name):
            for page in obstore.list(self._objects, "layers/", chunk_size=LISTED_AT_ONCE):
                for one in page:
                    _, digest, name = one["path"].split("/")
                    if name == MANIFEST_NAME:
                        yield digest

    def sweep(self) -> int:
        return self._local.sweep()

    def ready(self) -> bool:
        """Whether the store answers a question and the local folder can be written."""
        with suppress(Unavailable, NotFound), _errors(self._name):
            obstore.list_with_delimiter(self._objects, "ready/")
            return self._local.ready()
        return False


@contextmanager
def _errors(store: str, digest: str | None = None) -> Iterator[None]:
    """The library's errors as ours. Its texts hold URLs and answers, never credentials."""
    try:
        yield
    except FileNotFoundError as error:
        what = f"layer {digest} is not whole in" if digest else "no such object in"
        raise NotFound(f"{what} {store}", field="digest", cause="image") from error
    except (PermissionDeniedError, UnauthenticatedError) as error:
        raise Unavailable(f"{store} refuses our credentials", cause="image") from error
    except (BaseError, OSError, ValueError) as error:
        said = " ".join(str(error).split())[:SAID_MAX]
        raise Unavailable(f"{store} fails: {said}", cause="image") from error
