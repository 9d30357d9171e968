"""Source releases from the Python package index, checked against pinned hashes.

Owns: downloading and safe unpacking. Goes through pip, so whatever index, proxy or
mirror pip is set to is used and none is named here. pip asks each sdist's own build
back-end for metadata while downloading; the hash is checked before that.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

DOWNLOAD_TIMEOUT_S = 600
DOWNLOAD_TRIES = 3
MAX_UNPACKED_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Sdist:
    """One pinned source release."""

    project: str
    version: str
    sha256: str

    @property
    def requirement(self) -> str:
        return f"{self.project}=={self.version} --hash=sha256:{self.sha256}"


def download(sdists: Sequence[Sdist], into: Path) -> None:
    """Download ``sdists``, no two of one project, as archives into ``into``."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as requirements:
        requirements.write("".join(f"{sdist.requirement}\n" for sdist in sdists))
        requirements.flush()
        argv = [
            sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:",
            "--disable-pip-version-check", "--require-hashes",
            "--dest", str(into), "-r", requirements.name,
        ]  # fmt: skip
        for left in reversed(range(DOWNLOAD_TRIES)):
            done = subprocess.run(argv, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S)
            if done.returncode == 0:
                return
            if not left:
                raise RuntimeError(f"pip download failed:\n{done.stderr[-3000:]}")


def unpack(archive: Path, into: Path) -> None:
    """Unpack an sdist's single top directory's *content* into ``into``. A member that
    is no plain file or directory, or would land outside, raises ``ExtractError`` and
    nothing of it is written. (``extractall(filter=…)`` came with CPython 3.11.4;
    Debian 12 has 3.11.2.)"""
    with tarfile.open(archive) as tar:
        members = tar.getmembers()
        size = sum(member.size for member in members)
        if size > MAX_UNPACKED_BYTES:
            raise tarfile.ExtractError(f"{archive.name} unpacks to {size} bytes: too much")
        targets = [(member, into / _inner_path(member)) for member in members]
        into.mkdir(exist_ok=True)
        for member, target in targets:
            if member.isdir():
                target.mkdir(parents=True, exist_ok=True)
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            content = tar.extractfile(member)
            target.write_bytes(content.read() if content else b"")
            target.chmod(0o755 if member.mode & 0o100 else 0o644)


def _inner_path(member: tarfile.TarInfo) -> PurePosixPath:
    path = PurePosixPath(member.name)
    if not (member.isreg() or member.isdir()):
        raise tarfile.ExtractError(f"{member.name} is neither a file nor a directory")
    if path.is_absolute() or ".." in path.parts:
        raise tarfile.ExtractError(f"{member.name} would land outside")
    return PurePosixPath(*path.parts[1:])


def find_archive(folder: Path, sdist: Sdist) -> Path:
    """The archive of ``sdist`` in ``folder``; projects spell their file names freely."""
    wanted = _normalised(f"{sdist.project}-{sdist.version}.tar.gz")
    for path in folder.iterdir():
        if _normalised(path.name) == wanted:
            return path
    raise FileNotFoundError(f"no archive of {sdist.project} {sdist.version} in {folder}")


def _normalised(name: str) -> str:
    return name.lower().replace("_", "-")
