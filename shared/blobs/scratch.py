"""Working directories that a crash cannot leave for ever.

Owns: private directories locked by their owner, removal of those whose owner is gone,
disk errors as typed ones. Does not own: what is in them.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shared.errors import Unavailable


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


class Scratch:
    """Locked working directories below ``root``, which is made where it is missing."""

    def __init__(self, root: Path) -> None:
        self.root = root
        with disk_errors():
            root.mkdir(mode=0o700, parents=True, exist_ok=True)

    @contextmanager
    def workspace(self) -> Iterator[Path]:
        """A private empty directory, gone when the context ends."""
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
                path = Path(tempfile.mkdtemp(dir=self.root))
                with suppress(FileNotFoundError):
                    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                    fcntl.flock(fd, fcntl.LOCK_EX)
                    if path.exists():
                        return path, fd
                    os.close(fd)

    def holds(self, path: Path) -> bool:
        """Whether ``path`` is one level inside a working directory."""
        return path.parent.parent == self.root

    def sweep(self) -> int:
        """Remove directories whose owner is gone; returns how many."""
        swept = 0
        for path in list(self.root.iterdir()):
            with suppress(FileNotFoundError):
                swept += _remove_if_unowned(path)
        return swept

    def ready(self) -> bool:
        return os.access(self.root, os.W_OK)


def _remove_if_unowned(path: Path) -> bool:
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
