"""From a layer's digest to its files, in a store that is a local folder.

Owns: the folder's layout ``<root>/layers/<digest>/{meta.erofs,data.blob}``. Does not
own: mounting, fetching from a remote store.
"""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

from services.edge.drivers.base import Layer
from shared.errors import InvalidRequest, NotFound

META = "meta.erofs"
DATA = "data.blob"
MAX_KNOWN = 10_000
"""Layers remembered as present; a layer is immutable, so only its removal by garbage
collection makes one stale, and then the driver's mount names it."""
_DIGEST = re.compile(r"^[A-Za-z0-9][A-Za-z0-9:_+.-]{0,255}\Z")


class Locator:
    """Finds layers. ``store_url`` is ``file:///path``."""

    def __init__(self, store_url: str) -> None:
        url = urlsplit(store_url)
        if url.scheme != "file" or not url.path:
            raise InvalidRequest(f"store {store_url!r} is not file:///path", field="store_url")
        self._root = Path(unquote(url.path)) / "layers"
        self._known: OrderedDict[str, Layer] = OrderedDict()

    async def find(self, digests: Sequence[str]) -> list[Layer]:
        """The layers, in order. Raises ``NotFound`` (cause ``image``) for the first
        that is not there."""
        unknown = [d for d in digests if d not in self._known]
        if unknown:
            # a store on a network file system may block
            for layer in await asyncio.to_thread(lambda: [self._look(d) for d in unknown]):
                self._known[layer.digest] = layer
            while len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        return [self._known.get(d) or self._look(d) for d in digests]

    def forget(self, digest: str) -> None:
        """The layer turned out to be gone or broken."""
        self._known.pop(digest, None)

    def _look(self, digest: str) -> Layer:
        folder = self._root / digest
        # a digest is a name of one folder, never a path
        if not _DIGEST.match(digest) or not (folder / META).is_file():
            raise NotFound(f"layer {digest} is not in the store", cause="image", is_infra=True)
        data = folder / DATA
        return Layer(digest, str(folder / META), str(data) if data.is_file() else None)
