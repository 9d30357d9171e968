"""Where the demonstration keeps what is slow to make, and how it gets there whole.

Owns: the cache directory (``DSEC_CACHE``, else ``/var/cache/dsec``) and the rule that
an entry appears under its name only when it is complete.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

DEFAULT_CACHE = "/var/cache/dsec"


def cache_dir() -> Path:
    """The cache directory, made (mode 0700) when missing."""
    path = Path(os.environ.get("DSEC_CACHE") or DEFAULT_CACHE)
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


def make_once(entry: Path, make: Callable[[Path], None]) -> Path:
    """Return ``entry``; when it is missing let ``make(path)`` fill an empty directory
    beside it and rename that into place. Two processes make one; what a killed one
    left is removed."""
    entry.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _locked(entry.with_name(f".{entry.name}.lock")):
        if entry.exists():
            return entry
        for leftover in entry.parent.glob(f".{entry.name}.part-*"):
            shutil.rmtree(leftover)
        part = Path(tempfile.mkdtemp(prefix=f".{entry.name}.part-", dir=entry.parent))
        make(part)
        part.rename(entry)
    return entry


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
