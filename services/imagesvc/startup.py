"""Which files of an image are read first: what nodes fetch before they are asked for.

Owns: the programs that sandboxes begin with, the libraries they are linked to, what an
interpreter reads before its script. Does not own: where in a layer files lie
(:mod:`shared.erofs.writer`), fetching. Pure but for reading heads of files. It is a guess: a
wrong one costs bytes, a missing one time; what a first reader really read is added to it
(:mod:`services.imagesvc.accesses`).
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice

from services.imagesvc.elf import Linked, linked
from shared.erofs.layertree import SYMLINK_HOPS_MAX, Inode
from shared.errors import DsecError

SHARE, BYTES_MIN, BYTES_MAX = 0.06, 4 * 1024**2, 64 * 1024**2
"""What files read first may be of an image, but at least and at most so many bytes."""
LIBRARIES_MAX = 64
"""Of one program."""
PROGRAMS = (b"sh", b"bash", b"python3")
"""Beside the image's own: what commands and shells of sandboxes mostly are."""
PROGRAM_DIRS = (b"/usr/local/sbin", b"/usr/local/bin", b"/usr/sbin", b"/usr/bin", b"/sbin", b"/bin")
LIBRARY_DIRS = tuple(
    base + below
    for below in (b"", b"/x86_64-linux-gnu", b"/aarch64-linux-gnu")
    for base in (b"/lib", b"/usr/lib", b"/usr/local/lib", b"/lib64", b"/usr/lib64")
)
ALWAYS = (b"/etc/ld.so.cache", b"/etc/passwd", b"/etc/group", b"/etc/nsswitch.conf")
LOCALES = (
    b"/usr/lib/locale/C.utf8/LC_CTYPE",
    b"/usr/lib/x86_64-linux-gnu/gconv/gconv-modules.cache",
    b"/usr/lib/aarch64-linux-gnu/gconv/gconv-modules.cache",
)
"""Of interpreters that turn the C locale into one of UTF-8."""
PYTHON_MODULES = ("encodings/__init__", "encodings/aliases", "encodings/utf_8")
"""Imported before a script."""
PYTHON_FROZEN = (
    "codecs", "io", "abc", "site", "os", "stat", "posixpath", "genericpath", "_collections_abc",
    "_sitebuiltins",
)  # fmt: skip
FROZEN_SINCE = 11
"""The minor version from which on these are in the interpreter itself."""
_PYTHON = re.compile(rb"^python3\.(\d{1,3})$")
PTH_MAX, PTH_BYTES_MAX, PTH_IMPORTS_MAX = 32, 16 * 1024, 32
"""Files of paths, whose lines may import modules before a script."""
_IMPORTED = re.compile(rb"""(?:^|;)\s*import\s+(\w+)|__import__\(\s*['"](\w+)['"]""", re.MULTILINE)


def read_first(roots: Sequence[Inode], *, command: Sequence[str]) -> list[Inode]:
    """The regular files of an image's layers (bottom first) that are read first, in that
    order. ``command``: the image's own. Contents are read, heads of some files alone."""
    files = _Files(roots)
    budget = max(BYTES_MIN, min(BYTES_MAX, int(SHARE * files.bytes)))
    chosen: dict[int, Inode] = {}
    names = [*(name.encode() for name in command[:1]), *PROGRAMS]
    for name in names:
        wanted = {id(one): one for one in _of_program(files, name)}
        size = sum(one.size for key, one in wanted.items() if key not in chosen)
        if size <= budget:
            budget -= size
            chosen |= {key: one for key, one in wanted.items() if key not in chosen}
    return list(chosen.values())


def _of_program(files: _Files, name: bytes) -> Iterator[Inode]:
    found = _program(files, name)
    if found is None:
        return
    for path in ALWAYS:
        yield from files.some(path)
    path, inode = found
    yield from _closure(files, path, inode)
    version = _PYTHON.match(posixpath.basename(path))
    if version is not None:
        yield from _python(files, posixpath.dirname(posixpath.dirname(path)), int(version[1]))


def _program(files: _Files, name: bytes) -> tuple[bytes, Inode] | None:
    places = [name] if name.startswith(b"/") else [d + b"/" + name for d in PROGRAM_DIRS]
    return next((found for place in places if (found := files.find(place)) is not None), None)


def _closure(files: _Files, path: bytes, inode: Inode) -> Iterator[Inode]:
    """A program, its interpreter and its libraries, each once."""
    seen: set[int] = set()
    queue = [(path, inode)]
    while queue and len(seen) < LIBRARIES_MAX:
        path, inode = queue.pop(0)
        if id(inode) in seen:
            continue
        seen.add(id(inode))
        yield inode
        needs = linked(partial(_read, inode))
        if needs is not None:
            queue += _needed(files, path, needs)


def _needed(files: _Files, path: bytes, needs: Linked) -> Iterator[tuple[bytes, Inode]]:
    if needs.interpreter and (found := files.find(needs.interpreter)) is not None:
        yield found
    origin = posixpath.dirname(path)
    own = [place.replace(b"$ORIGIN", origin).replace(b"${ORIGIN}", origin) for place in needs.paths]
    for name in needs.names:
        places = [name] if b"/" in name else [d + b"/" + name for d in (*own, *LIBRARY_DIRS)]
        found = next((one for place in places if (one := files.find(place)) is not None), None)
        if found is not None:
            yield found


def _python(files: _Files, prefix: bytes, minor: int) -> Iterator[Inode]:
    for path in LOCALES:
        yield from files.some(path)
    modules = PYTHON_MODULES if minor >= FROZEN_SINCE else PYTHON_MODULES + PYTHON_FROZEN
    for module in modules:
        folder, name = posixpath.split(module)
        compiled = f"lib/python3.{minor}/{folder}/__pycache__/{name}.cpython-3{minor}.pyc"
        yield from files.some(posixpath.join(prefix, compiled.encode()))
    for place in (b"python3/dist-packages", b"python3.%d/site-packages" % minor):
        yield from _site(files, posixpath.join(prefix, b"lib", place), minor)


def _site(files: _Files, folder: bytes, minor: int) -> Iterator[Inode]:
    """What files of paths in a folder of packages import: setuptools has one everywhere."""
    names = [name for name in files.names(folder) if name.endswith(b".pth")]
    for name in sorted(names)[:PTH_MAX]:
        for inode in files.some(posixpath.join(folder, name)):
            yield inode
            found = _IMPORTED.finditer(_read(inode, 0, PTH_BYTES_MAX))
            for module in (one[1] or one[2] for one in islice(found, PTH_IMPORTS_MAX)):
                for place in (module + b"/__pycache__/__init__", b"__pycache__/" + module):
                    path = place + b".cpython-3%d.pyc" % minor
                    yield from files.some(posixpath.join(folder, path))


class _Files:
    """The files of an image, by absolute path; upper layers cover lower ones. Links are
    followed, and the image's root is the only root there is."""

    def __init__(self, roots: Sequence[Inode]) -> None:
        self._roots = list(reversed(roots))
        self.bytes = sum(_bytes(root) for root in roots)

    def some(self, path: bytes) -> Iterator[Inode]:
        found = self.find(path)
        if found is not None:
            yield found[1]

    def names(self, path: bytes) -> set[bytes]:
        """Of a directory's entries, whatever layer has them; some may be deleted."""
        parts = path.strip(b"/").split(b"/")
        found: set[bytes] = set()
        for root in self._roots:
            at: Inode | None = root
            for part in parts:
                at = at.children.get(part) if at is not None else None
            found |= set(at.children) if at is not None else set()
        return found

    def find(self, path: bytes) -> tuple[bytes, Inode] | None:
        """A regular file and where it really is."""
        for _ in range(SYMLINK_HOPS_MAX):
            path = posixpath.normpath(b"/" + path.lstrip(b"/"))
            seen = self._look(path)
            if isinstance(seen, Inode):
                return (path, seen) if seen.is_regular else None
            if seen is None:
                return None
            path = seen
        return None

    def _look(self, path: bytes) -> Inode | bytes | None:
        """What is there, or the path that a link on the way makes of it."""
        parts = path.strip(b"/").split(b"/")
        for root in self._roots:
            at = root
            for depth, part in enumerate(parts):
                child = at.children.get(part)
                if child is None:
                    break  # perhaps a lower layer has it
                if child.is_link:
                    base = b"/" + b"/".join(parts[:depth])
                    return posixpath.join(base, child.target, *parts[depth + 1 :])
                if child.is_whiteout or not (child.is_dir or depth == len(parts) - 1):
                    return None
                at = child
            else:
                return at
        return None


def _bytes(root: Inode) -> int:
    total, queue = 0, [root]
    while queue:
        inode = queue.pop()
        total += inode.size
        queue += inode.children.values()
    return total


def _read(inode: Inode, at: int, size: int) -> bytes:
    """Bytes of a file that is whole in one place; empty where it is not, or unreadable."""
    source = inode.source
    if source is None or len(inode.extents) != 1 or at >= inode.size:
        return b""
    try:
        start = inode.extents[0].source_offset + at
        return source.pread(min(size, inode.size - at), start)
    except (DsecError, OSError):
        return b""
    finally:
        source.close()
