"""The interface of stores: :class:`BlobStore` to write and keep, :class:`LayerReader` to read.

Two protocols, because a node only reads. What is put is immutable and visible at once and
whole; readers see a layer as soon as :meth:`BlobStore.put_layer` has returned.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from shared.blobs.layout import LayerFiles, LayerManifest


@dataclass(frozen=True, slots=True)
class Incoming:
    """A place for the files of one layer that is made on another machine: a ``folder``
    that both see, or a URL to PUT each of them to, by file name."""

    token: str
    folder: Path | None = None
    urls: Mapping[str, str] = field(default_factory=dict)


Content = bytes | memoryview
"""What was read: whose memory it is (a library's, perhaps) makes no difference."""


class LayerReader(Protocol):
    """Reads layers. Errors: ``NotFound``, ``Unavailable`` (may be asked again)."""

    async def fetch_manifest(self, digest: str) -> LayerManifest: ...

    async def fetch(self, digest: str, name: str, start: int, length: int) -> Content:
        """``length`` bytes of one of the layer's files from ``start``; fewer at its end."""
        ...


class BlobStore(LayerReader, Protocol):
    """Immutable layers by digest. The calls below block; errors are typed."""

    def workspace(self) -> AbstractContextManager[Path]:
        """A private empty directory, gone when the context ends, from which layers are put."""
        ...

    def put_layer(self, files: LayerFiles) -> LayerManifest:
        """Take over finished files; visible at once and whole. Putting twice is harmless."""
        ...

    def incoming(self) -> AbstractContextManager[Incoming]:
        """A place, gone when the context ends."""
        ...

    def adopt(self, manifest: LayerManifest, incoming: Incoming) -> LayerManifest:
        """Take over what came there. Raises ``Damaged`` where it is not what ``manifest``
        says; of a remote store's data only the size is looked at, readers check it."""
        ...

    def has(self, digest: str) -> bool: ...

    def manifest(self, digest: str) -> LayerManifest:
        """Raises ``NotFound``."""
        ...

    def hint(self, digest: str, first: Sequence[int]) -> None:
        """Notes chunks of a layer that were read first, for nodes that fetch on demand; of
        one that is not there nothing. Not beside its removal."""
        ...

    def delete(self, digest: str) -> bool:
        """Remove a layer, or what is left of one; ``False`` where nothing was there."""
        ...

    def list(self) -> Iterator[str]:
        """Digests of whole layers."""
        ...

    def sweep(self) -> int:
        """Remove working directories of crashed processes; returns how many."""
        ...

    def ready(self) -> bool:
        """Whether layers can be put."""
        ...
