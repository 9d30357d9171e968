"""Local files as one stream of bytes, to be handed over to the image service.

Owns: tars of directories that lose nothing (types, owners, nanosecond times, xattrs, hard
links), bundles of git commits. Does not own: sending them.
"""

from __future__ import annotations

import os
import stat
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

from libdsec.errors import Conflict, InvalidRequest

PIECE_BYTES = 512 * 1024
XATTR = "SCHILY.xattr."


def is_layout(path: Path) -> bool:
    """Whether a directory is an OCI layout."""
    return (path / "oci-layout").is_file() and (path / "index.json").is_file()


def tree_bytes(path: Path) -> int:
    """The size of a directory's files, for a progress bar."""
    return sum(
        os.lstat(os.path.join(at, name)).st_size for at, _, names in os.walk(path) for name in names
    )


def tar_pieces(folder: Path) -> Iterator[bytes]:
    """A directory as a tar, in pieces of about :data:`PIECE_BYTES`. Raises ``InvalidRequest``
    for what cannot be read, ``Conflict`` where a file changed meanwhile."""
    out = _Pieces()
    with tarfile.open(
        fileobj=cast(IO[bytes], out), mode="w|", format=tarfile.PAX_FORMAT, encoding="utf-8",
        errors="surrogateescape",
    ) as tar:  # fmt: skip
        for path, name in _entries(folder):
            info = _header(tar, path, name)
            if info is None:
                continue
            tar.addfile(info)
            if info.isreg():
                for piece in _content(path, info.size):
                    _write(tar, piece)
                    yield from out.full()
                _write(tar, bytes(-info.size % tarfile.BLOCKSIZE))
            yield from out.full()
    yield from out.rest()


def _write(tar: tarfile.TarFile, piece: bytes) -> None:
    assert tar.fileobj is not None
    tar.fileobj.write(piece)
    tar.offset += len(piece)


def _entries(folder: Path) -> Iterator[tuple[Path, str]]:
    """Everything below a directory, which comes first, with relative names."""

    def fail(error: OSError) -> None:
        raise InvalidRequest(f"{error.filename}: {error.strerror}", field="path") from error

    for at, folders, files in os.walk(folder, onerror=fail):
        folders.sort()
        here = Path(at)
        yield here, os.path.relpath(at, folder)
        links = [name for name in folders if (here / name).is_symlink()]
        for name in sorted([*files, *links]):
            yield here / name, os.path.relpath(here / name, folder)


def _header(tar: tarfile.TarFile, path: Path, name: str) -> tarfile.TarInfo | None:
    """``None`` for sockets, which no tar holds."""
    try:
        info = tar.gettarinfo(path, name)
        if info is None:
            return None
        info.uname = info.gname = ""
        at, extra = os.lstat(path), dict[str, str]()
        if at.st_mtime_ns % 1_000_000_000 and at.st_mtime_ns > 0:
            whole, part = divmod(at.st_mtime_ns, 1_000_000_000)
            extra["mtime"] = f"{whole}.{part:09d}"
        info.mtime = at.st_mtime_ns // 1_000_000_000
        if not info.islnk():
            for key in os.listxattr(path, follow_symlinks=False):
                value = os.getxattr(path, key, follow_symlinks=False)
                extra[XATTR + key] = value.decode("utf-8", "surrogateescape")
    except OSError as error:
        raise InvalidRequest(f"{path}: {error.strerror}", field="path") from error
    info.pax_headers = extra
    return info


def _content(path: Path, size: int) -> Iterator[bytes]:
    """Exactly ``size`` bytes."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise InvalidRequest(f"{path}: {error.strerror}", field="path") from error
    with open(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise Conflict(f"{path} changed while it was read", field="path")
        while size:
            piece = file.read(min(PIECE_BYTES, size))
            if not piece:
                raise Conflict(f"{path} changed while it was read", field="path")
            size -= len(piece)
            yield piece


class _Pieces:
    """What was written and not yet taken."""

    def __init__(self) -> None:
        self._held = bytearray()

    def write(self, data: bytes) -> int:
        self._held += data
        return len(data)

    def full(self) -> Iterator[bytes]:
        while len(self._held) >= PIECE_BYTES:
            yield bytes(self._held[:PIECE_BYTES])
            del self._held[:PIECE_BYTES]

    def rest(self) -> Iterator[bytes]:
        yield from self.full()
        if self._held:
            yield bytes(self._held)
            self._held.clear()


@contextmanager
def bundle(repository: Path, revision: str) -> Iterator[tuple[Path, str]]:
    """A file with one commit and what it reaches, and the commit's id: nothing that came
    later leaves this machine. The repository is only read."""
    with tempfile.TemporaryDirectory(prefix="dsec-") as name:
        commit = _git(
            repository, "rev-parse", "-q", "--verify", "--end-of-options", revision + "^{commit}"
        )
        objects = _git(repository, "rev-parse", "--path-format=absolute", "--git-path", "objects")
        bare = Path(name) / "bare"
        _git(Path(name), "init", "-q", "--bare", "--template=", str(bare))
        info = bare / "objects/info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "alternates").write_text(objects + "\n")
        _git(bare, "update-ref", "refs/heads/main", commit)
        made = Path(name) / "commit.bundle"
        _git(bare, "bundle", "create", "-q", str(made), "refs/heads/main")
        yield made, commit


def _git(cwd: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=cwd, capture_output=True, text=True, errors="replace",
            check=False,
        )  # fmt: skip
    except FileNotFoundError as error:
        raise InvalidRequest("git is not installed, or there is no such folder",
                             field="git") from error  # fmt: skip
    except NotADirectoryError as error:
        raise InvalidRequest(f"{cwd} is no repository", field="git") from error
    if done.returncode:
        text = done.stderr.strip()[-500:] or f"there is no {arguments[-1]!r}"
        raise InvalidRequest(f"git: {text}", field="git")
    return done.stdout.strip()
