"""Which layers are open, over the death of the process that serves them.

Owns: one empty file per open file, named by the request that opened it: the kernel sends
a request again that a dead process had not answered, and then finds it noted already.
Does not own: what is done for open layers.
"""

from __future__ import annotations

import time
from collections import Counter
from contextlib import suppress
from pathlib import Path


class Opens:
    """Open files of one FUSE connection; ``root`` is its folder."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._held_until: dict[str, float] = {}
        root.mkdir(parents=True, exist_ok=True)
        names = (path.name.partition(".") for path in root.iterdir())
        self._handles = {int(handle): digest for handle, _, digest in names}
        self._counts = Counter(self._handles.values())

    def __len__(self) -> int:
        return len(self._handles)

    def opened(self, handle: int, digest: str) -> None:
        """Noted before it is answered."""
        if handle not in self._handles:
            with suppress(OSError):  # on a full disk it is known as long as this process lives
                self._path(handle, digest).touch()
            self._handles[handle] = digest
            self._counts[digest] += 1

    def closed(self, handle: int) -> str | None:
        """The layer, or ``None`` where it was noted already."""
        digest = self._handles.pop(handle, None)
        if digest is not None:
            self._path(handle, digest).unlink(missing_ok=True)
            self._counts[digest] -= 1
            if not self._counts[digest]:
                del self._counts[digest]
        return digest

    def hold(self, digest: str, seconds: float) -> None:
        """Counts it as in use for a while: it is about to be opened."""
        now = time.monotonic()
        self._held_until = {d: t for d, t in self._held_until.items() if t > now}
        self._held_until[digest] = now + seconds

    def is_open(self, digest: str) -> bool:
        return self._counts[digest] > 0

    def in_use(self, digest: str) -> bool:
        return self.is_open(digest) or self._held_until.get(digest, 0.0) > time.monotonic()

    def _path(self, handle: int, digest: str) -> Path:
        return self._root / f"{handle}.{digest}"
