"""The tree of one layer, in memory: what a layer says about a file system.

Owns: inodes, names, implicit parents, OCI whiteouts and opaque directories,
hard links (also to files of lower layers), overlay merging. Does not own: file
contents (an inode only refers to byte ranges of a source), archive formats, the
EROFS encoding. Pure: nothing here touches a disk, so no name in an archive can
reach outside of the tree.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

from shared.errors import InvalidRequest, Unsupported

T = TypeVar("T")

NAME_MAX_BYTES = 255
DEPTH_MAX = 256  # directories; keeps the recursive merges within the interpreter's stack
TARGET_MAX_BYTES = 4095
MTIME_MAX_S = 2**40
ID_MAX = 2**32 - 2  # (uid_t)-1 is not an id
SYMLINK_HOPS_MAX = 40
OPAQUE_XATTR = b"trusted.overlay.opaque"
# Overlay's own notes that mean nothing outside of the upper directory they were made in.
TRANSIENT_OVERLAY_XATTRS = frozenset(
    b"trusted.overlay." + name for name in (b"origin", b"impure", b"nlink", b"uuid", b"upper")
)
OVERLAY_XATTR_PREFIX = b"trusted.overlay."

WHITEOUT_PREFIX = b".wh."
WHITEOUT_META_PREFIX = b".wh..wh."
WHITEOUT_OPAQUE = b".wh..wh..opq"

# Parents that a prefix makes up cover the base's own: keep the modes everyone relies on.
CONVENTIONAL_MODES = {b"tmp": 0o1777, b"var/tmp": 0o1777, b"dev/shm": 0o1777, b"root": 0o700}


class ByteSource(Protocol):
    """Where the bytes of regular files come from."""

    def pread(self, length: int, offset: int) -> bytes:
        """Up to ``length`` bytes at ``offset``; empty at the end of the source."""
        ...

    def confirm(self) -> None:
        """Called once a file's extents were read; raises ``Conflict`` if it changed."""
        ...

    def close(self) -> None:
        """Release what reading one file took; more may be read afterwards."""
        ...


@dataclass(frozen=True, slots=True)
class Extent:
    """``length`` bytes of a file at ``offset``, stored at ``source_offset``; gaps are holes."""

    offset: int
    length: int
    source_offset: int


@dataclass(slots=True, eq=False)
class Inode:
    """One inode; several names that refer to the same object are hard links.

    ``mode`` is a full ``st_mode``; ``size`` is in bytes (regular files only);
    ``implicit`` marks a directory that no source mentioned.
    """

    mode: int
    uid: int = 0
    gid: int = 0
    mtime_ns: int = 0
    rdev: int = 0
    size: int = 0
    source: ByteSource | None = None
    extents: tuple[Extent, ...] = ()
    target: bytes = b""
    xattrs: dict[bytes, bytes] = field(default_factory=dict)
    children: dict[bytes, Inode] = field(default_factory=dict)
    opaque: bool = False
    implicit: bool = False

    @property
    def is_dir(self) -> bool:
        return stat.S_ISDIR(self.mode)

    @property
    def is_link(self) -> bool:
        return stat.S_ISLNK(self.mode)

    @property
    def is_regular(self) -> bool:
        return stat.S_ISREG(self.mode)

    @property
    def is_device(self) -> bool:
        return stat.S_ISCHR(self.mode) or stat.S_ISBLK(self.mode)

    @property
    def has_holes(self) -> bool:
        return sum(extent.length for extent in self.extents) < self.size

    @property
    def is_whiteout(self) -> bool:
        return stat.S_ISCHR(self.mode) and self.rdev == 0


def new_dir(mode: int = 0o755, *, implicit: bool = False) -> Inode:
    return Inode(stat.S_IFDIR | mode, implicit=implicit)


def new_whiteout() -> Inode:
    return Inode(stat.S_IFCHR)


def split_path(path: bytes, *, field: str = "archive") -> list[bytes]:
    """The components of a relative path; ``./a//b/`` is ``[a, b]``, the root is ``[]``.

    Raises :class:`InvalidRequest` for absolute paths, ``..``, NUL and overlong names.
    """
    shown = path.decode(errors="backslashreplace")
    if path.startswith(b"/"):
        raise InvalidRequest(f"absolute name in a layer: {shown!r}", field=field)
    parts = [part for part in path.split(b"/") if part not in (b"", b".")]
    if len(parts) > DEPTH_MAX:
        raise InvalidRequest(
            f"more than {DEPTH_MAX} directories deep: {shown[:80]!r}…", field=field
        )
    if b".." in parts:
        raise InvalidRequest(f"'..' in a layer's name: {shown!r}", field=field)
    if b"\0" in path:
        raise InvalidRequest(f"NUL in a layer's name: {shown!r}", field=field)
    if len(path) > NAME_MAX_BYTES and max(map(len, parts), default=0) > NAME_MAX_BYTES:
        raise InvalidRequest(
            f"name longer than {NAME_MAX_BYTES} bytes: {shown[:80]!r}…", field=field
        )
    return parts


def checked(inode: Inode, path: bytes) -> Inode:
    """``inode`` with overlay's xattrs turned into flags; refuses what can't be expressed."""
    shown = path.decode(errors="backslashreplace")
    if not (0 <= inode.uid <= ID_MAX and 0 <= inode.gid <= ID_MAX):
        raise Unsupported(f"{shown!r}: owner {inode.uid}:{inode.gid} is not a valid id")
    if abs(inode.mtime_ns) > MTIME_MAX_S * 1_000_000_000:
        raise Unsupported(f"{shown!r}: modification time {inode.mtime_ns} ns")
    if inode.is_link and not 0 < len(inode.target) <= TARGET_MAX_BYTES:
        raise Unsupported(f"{shown!r}: link target of {len(inode.target)} bytes")
    for name in [name for name in inode.xattrs if name.startswith(OVERLAY_XATTR_PREFIX)]:
        value = inode.xattrs.pop(name)
        if name == OPAQUE_XATTR:
            inode.opaque = inode.is_dir and value == b"y"
        elif name not in TRANSIENT_OVERLAY_XATTRS:
            raise Unsupported(
                f"{shown!r}: {name.decode(errors='backslashreplace')} would redirect overlay"
            )
    return inode


class LayerTree:
    """A layer under construction.

    ``lower`` is the merged view of the layers below it (``None`` where they are
    unknown, as for a workspace): hard links, implicit parents and links on the
    way to an entry are resolved against it. ``lower`` is never changed.
    """

    def __init__(self, *, lower: Inode | None = None, field: str = "archive") -> None:
        self.root = self._implied(lower)
        self._lower = lower
        self._field = field
        self._last: tuple[list[bytes], Inode] | None = None

    @staticmethod
    def _implied(lower: Inode | None) -> Inode:
        if lower is None or not lower.is_dir:
            return new_dir(implicit=True)
        return replace(lower, children={}, opaque=False, implicit=True)

    def add(self, path: bytes, inode: Inode) -> None:
        """Put ``inode`` at ``path``; a later entry replaces an earlier one, directories merge."""
        parts = split_path(path, field=self._field)
        checked(inode, path)
        if not parts:
            self._set_root(inode)
            return
        parent = self._parent(parts, path)
        old = parent.children.get(parts[-1])
        if inode.is_dir and old is not None:
            if old.is_dir:
                inode.children = old.children
                inode.opaque |= old.opaque
            elif old.is_whiteout:
                inode.opaque = True
        self._put(parent, parts[-1], inode)

    def _put(self, parent: Inode, name: bytes, inode: Inode) -> None:
        if name in parent.children:
            self._last = None  # what is replaced may be on the way there
        parent.children[name] = inode

    def _set_root(self, inode: Inode) -> None:
        if not inode.is_dir:
            raise InvalidRequest("the root of a layer must be a directory", field=self._field)
        inode.children, inode.implicit = self.root.children, False
        inode.opaque |= self.root.opaque
        self.root, self._last = inode, None

    def link(self, path: bytes, target: bytes) -> None:
        """Make ``path`` a hard link to ``target`` of this layer or a lower one."""
        parts = split_path(path, field=self._field)
        goal = split_path(target, field=self._field)
        found = self._find(goal)
        if not parts or found is None or found.is_dir or found.is_whiteout:
            raise InvalidRequest(
                f"hard link {path.decode(errors='backslashreplace')!r} to "
                f"{target.decode(errors='backslashreplace')!r}, which no layer has",
                field=self._field,
            )
        self._put(self._parent(parts, path), parts[-1], found)

    def whiteout(self, path: bytes) -> None:
        """Delete ``path`` of lower layers; what this layer itself has there stays."""
        parts = split_path(path, field=self._field)
        if not parts:
            raise InvalidRequest("a whiteout of the root", field=self._field)
        parent = self._parent(parts, path)
        own = parent.children.get(parts[-1])
        if own is None:
            parent.children[parts[-1]] = new_whiteout()
        elif own.is_dir:
            own.opaque = True

    def make_opaque(self, path: bytes) -> None:
        """Hide all that lower layers have in the directory ``path``."""
        parts = split_path(path, field=self._field)
        self._parent([*parts, b""], path).opaque = True

    def add_oci(self, path: bytes, inode: Inode) -> None:
        """As :meth:`add`, with the whiteout names of OCI layers taken for what they mean."""
        head, _, name = path.rstrip(b"/").rpartition(b"/")
        if not name.startswith(WHITEOUT_PREFIX):
            self.add(path, inode)
        elif name == WHITEOUT_OPAQUE:
            self.make_opaque(head)
        elif not name.startswith(WHITEOUT_META_PREFIX):
            hidden = name[len(WHITEOUT_PREFIX) :]
            if hidden in (b"", b".", b".."):
                raise InvalidRequest(f"malformed whiteout {path!r}", field=self._field)
            self.whiteout((head + b"/" if head else b"") + hidden)

    def _parent(self, parts: list[bytes], path: bytes) -> Inode:
        """The directory that holds the last of ``parts``, made where it is missing.

        Most entries have that of the entry before, which is remembered where no link led to
        it: only something else in the place of a directory on the way changes it then.
        """
        if self._last is not None and self._last[0] == parts[:-1]:
            return self._last[1]
        trail = [(self.root, self._lower)]
        queue = list(reversed(parts[:-1]))
        hops = 0
        while queue:
            name = queue.pop()
            if name == b"..":
                trail = trail[: max(1, len(trail) - 1)]
                continue
            own_dir, low_dir = trail[-1]
            own, low = _children(own_dir, low_dir, name)
            seen = own if own is not None else low
            if seen is not None and seen.is_link:
                hops += 1
                trail = self._follow(seen, queue, trail, hops)
                continue
            if own is None or own.is_whiteout:
                fresh = self._implied(low)
                fresh.opaque = own is not None
                own = own_dir.children[name] = fresh
            elif not own.is_dir:
                shown = path.decode(errors="backslashreplace")
                raise InvalidRequest(f"{shown!r} is below a file", field=self._field)
            trail.append((own, low if low is not None and low.is_dir else None))
        if not hops:
            self._last = parts[:-1], trail[-1][0]
        return trail[-1][0]

    def _find(self, parts: list[bytes]) -> Inode | None:
        """What the merged view has at ``parts``, links on the way followed."""
        trail: list[tuple[Inode | None, Inode | None]] = [(self.root, self._lower)]
        queue = list(reversed(parts))
        hops = 0
        while queue:
            name = queue.pop()
            if name == b"..":
                trail = trail[: max(1, len(trail) - 1)]
                continue
            own, low = _children(*trail[-1], name)
            seen = own if own is not None else low
            if seen is None or seen.is_whiteout:
                return None
            if queue and seen.is_link:
                hops += 1
                trail = self._follow(seen, queue, trail, hops)
            else:
                trail.append((own, low))
        own, low = trail[-1]
        return own if own is not None else low

    def _follow(self, link: Inode, queue: list[bytes], trail: list[T], hops: int) -> list[T]:
        """Continue a walk at a symlink's target; the tree's root is the only root there is."""
        if hops > SYMLINK_HOPS_MAX:
            raise InvalidRequest("too many links on the way to a name", field=self._field)
        queue.extend(p for p in reversed(link.target.split(b"/")) if p not in (b"", b"."))
        return trail[:1] if link.target.startswith(b"/") else trail


def _children(
    own: Inode | None, low: Inode | None, name: bytes
) -> tuple[Inode | None, Inode | None]:
    """The entry ``name`` of a layer's directory and what it covers in the lower view."""
    own_child = own.children.get(name) if own is not None else None
    hidden = own is not None and (own.opaque or not own.is_dir)
    low_child = low.children.get(name) if low is not None and not hidden else None
    if own_child is not None and not own_child.is_dir:
        low_child = None
    return own_child, low_child


def nested(root: Inode, prefix: str) -> Inode:
    """``root`` placed at the absolute path ``prefix`` below a new root directory."""
    if not prefix.startswith("/"):
        raise InvalidRequest(f"prefix {prefix!r} is not absolute", field="prefix")
    parts = split_path(prefix.lstrip("/").encode(), field="prefix")
    for depth in range(len(parts), 0, -1):
        parent_path = b"/".join(parts[: depth - 1])
        parent = new_dir(CONVENTIONAL_MODES.get(parent_path, 0o755), implicit=True)
        parent.children[parts[depth - 1]] = root
        root = parent
    return root


def walk(root: Inode) -> Iterator[tuple[bytes, Inode]]:
    """All entries in canonical order (depth first, names by bytes), the root as ``b""``."""
    stack = [(b"", root)]
    while stack:
        path, inode = stack.pop()
        yield path, inode
        for name in sorted(inode.children, reverse=True):
            stack.append((path + b"/" + name if path else name, inode.children[name]))


def unique_inodes(root: Inode) -> Iterator[tuple[bytes, Inode]]:
    """As :func:`walk`, each inode once, under its first name."""
    seen: set[int] = set()
    for path, inode in walk(root):
        if id(inode) not in seen:
            seen.add(id(inode))
            yield path, inode


def owned_by(root: Inode, uid: int, gid: int) -> None:
    """Give every inode to ``uid:gid`` (squash)."""
    for _, inode in unique_inodes(root):
        inode.uid, inode.gid = uid, gid


def stored_bytes(root: Inode) -> int:
    """The bytes of data that a tree refers to, hard links counted once, holes not at all."""
    return sum(e.length for _, inode in unique_inodes(root) for e in inode.extents)
