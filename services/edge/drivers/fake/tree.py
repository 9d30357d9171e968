"""An in-memory file tree with the errors of a real one. Pure but for the time stamps
its caller gives.

Owns: paths, directories, regular files, symbolic links. Does not own: permissions of
users (a fake sandbox has one user that may everything).
"""

from __future__ import annotations

import errno
import posixpath
from typing import Literal

import msgspec

from services.edge.drivers.files import FileInfo
from shared.errors import Conflict, DsecError, Forbidden, InvalidRequest, NotFound

MAX_LINKS = 16
USERS = {"root": 0, "agent": 1000}
Kind = Literal["file", "dir", "symlink", "chr"]


class Node(msgspec.Struct):
    """A file, directory or link."""

    kind: Kind
    mode: int
    mtime: float
    data: bytes = b""
    target: str = ""
    children: dict[str, Node] = {}


class Tree(msgspec.Struct):
    """The root and everything below. ``limit_bytes`` bounds the size of all files."""

    root: Node
    limit_bytes: int | None = None

    def find(self, path: str, *, follow: bool = True) -> tuple[str, Node]:
        """The final path and its node. Raises ``NotFound`` or ``InvalidRequest``."""
        return self._walk(path, follow, 0)

    def _walk(self, path: str, follow: bool, links: int) -> tuple[str, Node]:
        if links > MAX_LINKS:
            raise failure("ELOOP", path)
        node, at = self.root, "/"
        parts = [p for p in _absolute(path).split("/") if p]
        for index, part in enumerate(parts):
            if node.kind != "dir":
                raise failure("ENOTDIR", path)
            if part not in node.children:
                raise failure("ENOENT", path)
            last = index == len(parts) - 1
            node = node.children[part]
            here = posixpath.join(at, part)
            if node.kind == "symlink" and (follow or not last):
                rest = "/".join(parts[index + 1 :])
                target = posixpath.join(at, node.target)
                return self._walk(posixpath.join(target, rest), follow, links + 1)
            at = here
        return at, node

    def info(self, path: str) -> FileInfo:
        """What stat says; a link is not followed."""
        at, node = self.find(path, follow=False)
        return _info(at, node)

    def entries(self, path: str) -> list[FileInfo]:
        """A directory's content, by name."""
        at, node = self.find(path)
        if node.kind != "dir":
            raise failure("ENOTDIR", path)
        return [_info(posixpath.join(at, n), c) for n, c in sorted(node.children.items())]

    def read(self, path: str) -> bytes:
        """A file's content."""
        _, node = self.find(path)
        if node.kind == "dir":
            raise failure("EISDIR", path)
        if node.kind != "file":
            raise failure("ENOTREG", path)
        return node.data

    def write(
        self, path: str, data: bytes, *, now: float, mode: int | None = None,
        append: bool = False,
    ) -> FileInfo:  # fmt: skip
        """Makes missing parents, replaces or extends a file."""
        parent, name = posixpath.split(_absolute(path))
        if not name:
            raise failure("EISDIR", path)
        self.mkdir(parent, now=now, parents=True)
        at, folder = self.find(parent)
        node = folder.children.get(name)
        if node is not None and node.kind == "symlink":
            at, node = self.find(path)
            at = posixpath.dirname(at)
        if node is not None and node.kind == "dir":
            raise failure("EISDIR", path)
        if node is not None and node.kind != "file":
            raise failure("ENOTREG", path)
        freed = 0 if append or node is None else len(node.data)
        if self.limit_bytes is not None and (
            self.size() - freed + len(data) > self.limit_bytes
        ):
            raise failure("ENOSPC", path)
        if node is None:
            node = folder.children[name] = Node("file", 0o644, now)
        node.data = node.data + data if append else data
        node.mtime = now
        if mode is not None:
            node.mode = mode
        return _info(posixpath.join(at, name), node)

    def mkdir(self, path: str, *, now: float, mode: int = 0o755, parents: bool = True) -> None:
        """Makes a directory; with ``parents`` one that is there is no error."""
        node, parts = self.root, [p for p in _absolute(path).split("/") if p]
        for index, part in enumerate(parts):
            last = index == len(parts) - 1
            child = node.children.get(part)
            if child is None:
                if not parents and not last:
                    raise failure("ENOENT", path)
                child = node.children[part] = Node("dir", mode if last else 0o755, now)
            elif last and not parents:
                raise failure("EEXIST", path)
            elif child.kind == "symlink":
                child = self.find("/" + "/".join(parts[: index + 1]))[1]
            if child.kind != "dir":
                raise failure("ENOTDIR", path)
            node = child

    def remove(self, path: str, *, recursive: bool = False) -> None:
        """Removes a file, or a directory that is empty or with ``recursive``."""
        _, node = self.find(path, follow=False)
        if node.kind == "dir" and node.children and not recursive:
            raise failure("ENOTEMPTY", path)
        parent, name = posixpath.split(_absolute(path))
        if not name:
            raise failure("EBUSY", path)
        self.find(parent)[1].children.pop(name)

    def move(self, source: str, target: str, *, now: float) -> None:
        """Renames; the target's parent must be there."""
        _, node = self.find(source, follow=False)
        inside = _absolute(target) + "/"
        if node.kind == "dir" and inside.startswith(_absolute(source) + "/"):
            raise failure("EINVAL", target)
        parent, name = posixpath.split(_absolute(target))
        folder = self.find(parent)[1]
        if folder.kind != "dir":
            raise failure("ENOTDIR", target)
        there = folder.children.get(name)
        if there is not None and there.kind == "dir" and (node.kind != "dir" or there.children):
            raise failure("EISDIR" if node.kind != "dir" else "ENOTEMPTY", target)
        self.remove(source, recursive=True)
        folder.children[name] = node

    def size(self) -> int:
        """Bytes of all files."""
        return _size(self.root)


def empty(now: float, *, limit_bytes: int | None = None) -> Tree:
    """A root with the usual directories and a few files."""
    tree = Tree(Node("dir", 0o755, now))
    for name in ("/tmp", "/root", "/home", "/etc", "/dev"):
        tree.mkdir(name, now=now)
    lines = "".join(f"{user}:x:{uid}:{uid}::/:/bin/sh\n" for user, uid in USERS.items())
    tree.write("/etc/passwd", lines.encode(), now=now)
    for name in ("null", "zero"):
        tree.find("/dev")[1].children[name] = Node("chr", 0o666, now)
    tree.limit_bytes = limit_bytes
    return tree


def failure(name: str, path: str) -> DsecError:
    """The typed error of an errno name."""
    kind: type[DsecError] = InvalidRequest
    if name in ("ENOENT", "ENOTDIR"):
        kind = NotFound
    elif name in ("EACCES", "EPERM"):
        kind = Forbidden
    elif name == "ESTALE":
        kind = Conflict
    number = getattr(errno, name, 0)
    text = errno.errorcode.get(number, name)
    return kind(f"{path}: {text}", field="path", details={"errno": name})


def _absolute(path: str) -> str:
    if "\0" in path:
        raise InvalidRequest("a zero byte in the path", field="path")
    return posixpath.normpath(posixpath.join("/", path)).replace("//", "/")


def _info(path: str, node: Node) -> FileInfo:
    return FileInfo(
        path=path, type=node.kind, size=len(node.data), mode=node.mode, uid=0, gid=0,
        mtime=node.mtime, target=node.target or None,
    )  # fmt: skip


def _size(node: Node) -> int:
    return len(node.data) + sum(_size(child) for child in node.children.values())
