"""From a layer's digest to its files on this node.

Owns: the layout of a local folder, and which way a layer comes: mounted straight from a
folder, or through the layer service from a remote store. Does not own: mounting, fetching.
"""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from services.edge.drivers.base import Layer
from services.edge.layers.client import LayerService
from shared.blobs import opening
from shared.blobs.layout import DATA_NAME, META_NAME
from shared.errors import DsecError, NotFound

MAX_KNOWN = 10_000
"""Layers remembered as present; a layer is immutable, so only its removal by garbage
collection makes one stale, and then the driver's mount names it."""
WAITING_MAX = 64
"""Questions to the layer service at a time."""
_DIGEST = re.compile(r"^[A-Za-z0-9][A-Za-z0-9:_+.-]{0,255}\Z")


class Locator(Protocol):
    """Finds layers."""

    async def find(self, digests: Sequence[str]) -> list[Layer]:
        """The layers, in order. Raises ``NotFound`` (cause ``image``) for the first
        that is not there, ``Unavailable`` where the store does not answer."""
        ...

    async def fetched_bytes(self, digests: Sequence[str]) -> int | None:
        """Of their data, by this node so far; ``None`` where that is not known."""
        ...


def locator(store_url: str, service: LayerService) -> Locator:
    """How layers of the store at ``store_url`` are found."""
    return RemoteLocator(service) if opening.is_remote(store_url) else FolderLocator(store_url)


class RemoteLocator:
    """Layers of a remote store, by way of the layer service."""

    def __init__(self, service: LayerService) -> None:
        self._service = service
        # of its own: starts that wait for an absent store must hold up nothing else
        self._threads = ThreadPoolExecutor(WAITING_MAX, thread_name_prefix="layers")

    async def find(self, digests: Sequence[str]) -> list[Layer]:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._service.prepare, digests)

    async def fetched_bytes(self, digests: Sequence[str]) -> int | None:
        try:
            return await asyncio.to_thread(self._service.fetched_bytes, digests)
        except DsecError:  # the service is away: it counts anew when it is back
            return None


class FolderLocator:
    """Layers of a folder. ``store_url`` is ``file:///path``."""

    def __init__(self, store_url: str) -> None:
        self._root = opening.folder(store_url) / "layers"
        self._known: OrderedDict[str, Layer] = OrderedDict()

    async def find(self, digests: Sequence[str]) -> list[Layer]:
        unknown = [d for d in digests if d not in self._known]
        if unknown:
            # a store on a network file system may block
            for layer in await asyncio.to_thread(lambda: [self._look(d) for d in unknown]):
                self._known[layer.digest] = layer
            while len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        return [self._known.get(d) or self._look(d) for d in digests]

    async def fetched_bytes(self, digests: Sequence[str]) -> int | None:
        return 0  # they are mounted where they are

    def forget(self, digest: str) -> None:
        """The layer turned out to be gone or broken."""
        self._known.pop(digest, None)

    def _look(self, digest: str) -> Layer:
        folder = self._root / digest
        # a digest is a name of one folder, never a path
        if not _DIGEST.match(digest) or not (folder / META_NAME).is_file():
            raise NotFound(f"layer {digest} is not in the store", cause="image", is_infra=True)
        data = folder / DATA_NAME
        return Layer(digest, str(folder / META_NAME), str(data) if data.is_file() else None)
