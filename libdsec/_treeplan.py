"""What of a tree is copied, in which portions. Pure.

Owns: names that stay inside their root, what is left out, what is there already, links
that lead outside. Does not own: copying (:mod:`libdsec._trees`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from libdsec._bundle import Entry
from libdsec._wire import INLINE_BYTES
from libdsec.errors import InvalidRequest, NotARegularFile
from libdsec.results import FileInfo

SAME_NS = 1000
"""Times of change nearer than this are the same: not every file system has them finer."""
BUNDLE_BYTES = 2 * 1024 * 1024
BUNDLE_FILES = 512
NAMES_BYTES = INLINE_BYTES // 2


@dataclass(frozen=True, slots=True)
class Item:
    """One name of a tree. ``kind`` as in bundles; ``id`` tells names of one file."""

    name: str
    kind: str
    size: int = 0
    mode: int = 0
    mtime_ns: int = 0
    target: str = ""
    id: tuple[int, int] | None = None

    def entry(self, **changes: int) -> Entry:
        """As it goes into a bundle, without content."""
        mode = changes.get("mode", self.mode)
        return Entry(self.kind, self.name, mode, self.mtime_ns, self.target)


def left_out(name: str, patterns: Sequence[str]) -> bool:
    """Whether a pattern matches the relative ``name``: any part of it, or, with ``/`` in
    the pattern, it or a directory above, from the root on."""
    parts = name.split("/")
    for pattern in patterns:
        wanted = pattern.strip("/").split("/")
        if "/" not in pattern.rstrip("/"):
            if any(fnmatchcase(part, wanted[0]) for part in parts):
                return True
        elif len(wanted) <= len(parts) and all(map(fnmatchcase, parts, wanted)):
            return True
    return False


def special(path: str) -> NotARegularFile:
    """The refusal of what is no file, directory or link."""
    return NotARegularFile(
        f"{path} is no file, directory or link (exclude= leaves it out)", path=path
    )


def shared_names(items: list[Item]) -> list[Item]:
    """Further names of one file become links to its first one."""
    first: dict[tuple[int, int], str] = {}
    made = []
    for item in items:
        known = first.setdefault(item.id, item.name) if item.id else item.name
        made.append(item if known == item.name else Item(item.name, "h", target=known))
    return made


def remote_items(root: str, found: Iterable[FileInfo], exclude: Sequence[str]) -> list[Item]:
    """What a listing of ``root`` says, relative to it. Raises as :func:`scan`."""
    kinds = {"file": "f", "dir": "d", "directory": "d", "symlink": "l"}
    items = []
    for info in found:
        name = inside(root, info.path)
        if left_out(name, exclude):
            continue
        if info.type not in kinds:
            raise special(info.path)
        kind = kinds[info.type]
        id = (0, info.ino) if kind == "f" and info.nlink > 1 else None
        target = info.target or ""
        items.append(Item(name, kind, info.size, info.mode, info.mtime_ns, target, id))
    return shared_names(items)


def inside(root: str, path: str) -> str:
    """The name of ``path`` relative to ``root``. Raises ``InvalidRequest`` for one
    that leads out of it."""
    base = root.rstrip("/") + "/"
    name = path.removeprefix(base)
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if name.startswith("/") or not parts or ".." in parts:
        raise InvalidRequest(f"the sandbox names {path!r}, which is not in {root!r}")
    return "/".join(parts)


def leads_outside(name: str, target: str) -> bool:
    """Whether a symbolic link ``name`` with this target points out of the tree."""
    if target.startswith("/"):
        return True
    depth = name.count("/")
    for part in target.split("/"):
        depth += {"..": -1, ".": 0, "": 0}.get(part, 1)
        if depth < 0:
            return True
    return False


def same(item: Item, there: Item | None) -> bool:
    """Whether what is there needs no transfer."""
    if there is None or there.kind != item.kind:
        return False
    if item.kind == "l":
        return there.target == item.target
    near = abs(there.mtime_ns - item.mtime_ns) < SAME_NS
    return near and (there.size, there.mode) == (item.size, item.mode)


def batches(files: Iterable[Item]) -> Iterator[list[Item]]:
    """Small files by bundles, within the bounds of one."""
    batch: list[Item] = []
    size = named = 0
    for item in files:
        length = len(os.fsencode(item.name)) + 1
        full = len(batch) == BUNDLE_FILES or named + length > NAMES_BYTES
        if batch and (full or size + item.size > BUNDLE_BYTES):
            yield batch
            batch, size, named = [], 0, 0
        batch.append(item)
        size, named = size + item.size, named + length
    if batch:
        yield batch
