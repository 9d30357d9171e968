"""Where an image, workspace or toolkit comes from, and where it goes in a sandbox.

Owns: the kinds of sources. Does not own: who may name which (``intake``), reading them
(``reading``).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from schemas.image import Kind
from services.imagesvc.names import RegistryName

SMALL_ENTRIES = 2_000
"""Entries that are looked at to find out whether a source is small."""


@dataclass(frozen=True, slots=True)
class PathSource:
    """A directory, a layer tar (plain or compressed), a ``docker save`` archive or an OCI layout.

    ``reference`` chooses one image of an archive with several. ``form``: ``image`` and
    ``tree`` accept only that, ``auto`` both.
    """

    path: Path
    reference: str | None = None
    form: Literal["auto", "image", "tree"] = "auto"


@dataclass(frozen=True, slots=True)
class DockerSource:
    """An image of the local container engine."""

    reference: str


@dataclass(frozen=True, slots=True)
class GitSource:
    """A local git repository or bundle, rebuilt at ``commit`` without what came after it."""

    path: Path
    commit: str = "HEAD"


@dataclass(frozen=True, slots=True)
class RegistrySource:
    """An image of a registry; ``plain_http`` where the operator says so."""

    name: RegistryName
    plain_http: bool = False


@dataclass(frozen=True, slots=True)
class BuildSource:
    """A build context, a directory or a tar of one, whose ``dockerfile`` the engine builds
    up to ``target``."""

    path: Path
    dockerfile: str = "Dockerfile"
    target: str | None = None


Source = PathSource | DockerSource | GitSource | RegistrySource | BuildSource


@dataclass(frozen=True, slots=True)
class ImportRequest:
    """What to import and where it goes in a sandbox.

    ``prefix``: absolute path at which the source's root appears. ``owner``:
    ``(uid, gid)`` for all entries instead of the source's.
    """

    source: Source
    kind: Kind = "base"
    prefix: str = "/"
    owner: tuple[int, int] | None = None


def is_small(source: Source, limit: int) -> bool:
    """Whether a look at a folder or file, of SMALL_ENTRIES entries at most, shows no
    more than ``limit`` bytes."""
    if not isinstance(source, PathSource):
        return False
    total = 0
    try:
        if not source.path.is_dir():
            return source.path.stat().st_size <= limit
        files = (os.path.join(at, n) for at, _, names in os.walk(source.path) for n in names)
        for count, file in enumerate(files):
            total += os.lstat(file).st_size
            if total > limit or count >= SMALL_ENTRIES:
                return False
    except OSError:  # the import itself will say what is wrong
        return False
    return True
