"""Git repositories without what HEAD does not reach.

Owns: which objects of a packed layer stay, and what names the others: refs, reflogs, packed
refs. Does not own: git's formats (:mod:`services.edge.snapshots.gitobjects`), other
residue. No git runs here: a sandbox's configuration would have it run programs.

The tree is what the sandbox changed. An object that is not in it lies in the layers below, and
so does all that it names, because an object is written after those it names. So only objects
in the tree are read, from HEAD and the index on.
"""

from __future__ import annotations

import contextlib
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from services.edge.snapshots import gitobjects
from services.edge.snapshots.gitobjects import MALFORMED, OBJECTS_MAX, Budget, Object, Pack, TooMuch
from services.edge.snapshots.scrub import Report
from shared.erofs.layertree import Extent, Inode, stored_bytes
from shared.errors import InvalidRequest, Unsupported

RULE = "git"
READ_BYTES_MAX = 512 << 20
"""Packs of one repository are read into memory."""
SYMBOLIC_MAX = 8
_MARKS = (b"HEAD", b"refs", b"packed-refs", b"index", b"logs")
_ALWAYS = (b"logs", b"ORIG_HEAD", b"FETCH_HEAD")
_DERIVED = (b"commit-graph", b"commit-graphs")
_ID_DIGITS, _LONG_ID_DIGITS = 40, 64

Below = Callable[[bytes], bytes | None]
"""What the sandbox sees at a path that the tree does not have; ``None``: nothing."""


class _Bytes:
    """A file's content in memory."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def pread(self, length: int, offset: int) -> bytes:
        return self._data[offset : offset + length]

    def confirm(self) -> None: ...

    def close(self) -> None: ...


def scrub(
    root: Inode, below: Below, report: Report, *, tick: Callable[[int], None] = lambda _done: None
) -> None:
    """Takes what HEAD and the index do not reach out of every repository of the tree.
    Raises ``InvalidRequest`` (``scrub``) for one that cannot be read and ``Unsupported`` for
    one that is too large. ``tick`` is called often and may raise."""
    budget = Budget(tick=tick)
    for path, folder in list(_repositories(root, b"")):
        shown = path.decode(errors="backslashreplace")
        try:
            _Repository(folder, path, below, report, budget).scrub()
        except TooMuch as error:
            raise Unsupported(
                f"/{shown}: too much of {error} to look through; scrub=False packs them as "
                "they are",
                field="scrub",
            ) from error
        except MALFORMED as error:
            raise InvalidRequest(
                f"/{shown}: git's objects cannot be read ({error}); scrub=False packs them as "
                "they are",
                field="scrub",
            ) from error


def _repositories(at: Inode, path: bytes) -> Iterator[tuple[bytes, Inode]]:
    for name, inode in at.children.items():
        if not inode.is_dir:
            continue
        below = path + b"/" + name if path else name
        objects = inode.children.get(b"objects")
        known = name == b".git" or any(mark in inode.children for mark in _MARKS)
        if known and (name == b".git" or (objects is not None and objects.is_dir)):
            yield below, inode
        yield from _repositories(inode, below)


@dataclass(slots=True)
class _Repository:
    folder: Inode
    path: bytes
    below: Below
    report: Report
    budget: Budget
    loose: dict[bytes, tuple[Inode, bytes]] = field(default_factory=dict)
    packs: dict[bytes, tuple[Pack, Inode, bytes]] = field(default_factory=dict)
    read_bytes: int = 0

    def scrub(self) -> None:
        self._find()
        gone = self._gone()
        for name in _ALWAYS:
            self._remove(self.folder, name, b"")
        if not gone:
            return
        for id in self.loose.keys() & gone:
            holder, name = self.loose[id]
            self._remove(holder, name, b"objects/%s/" % id.hex()[:2].encode())
        for name in list(self.packs):
            self._repack(name, gone)
        self._unname(self._at(b"refs"), b"refs/", gone)
        self._unname(self.folder, b"", gone, only=b"_HEAD")
        self._packed_refs(gone)
        info = self._at(b"objects/info")
        for name in _DERIVED if info is not None else ():
            self._remove(info, name, b"objects/info/")  # type: ignore[arg-type]

    # -- what there is ------------------------------------------------------------------

    def _at(self, path: bytes) -> Inode | None:
        at: Inode | None = self.folder
        for name in path.split(b"/"):
            at = at.children.get(name) if at is not None else None
        return at

    def _find(self) -> None:
        objects = self._at(b"objects")
        for first, folder in objects.children.items() if objects is not None else ():
            if len(first) == 2 and folder.is_dir:
                for rest, inode in folder.children.items():
                    if len(rest) == _LONG_ID_DIGITS - 2:
                        raise ValueError("its ids are of SHA-256")
                    if inode.is_regular and len(rest) == _ID_DIGITS - 2:
                        with contextlib.suppress(ValueError):
                            self.loose[bytes.fromhex((first + rest).decode())] = (folder, rest)
        packs = self._at(b"objects/pack")
        for name, inode in packs.children.items() if packs is not None else ():
            stem, _, kind = name.rpartition(b".")
            pack = packs.children.get(stem + b".pack") if packs is not None else None
            if kind == b"idx" and inode.is_regular and pack is not None and pack.is_regular:
                assert packs is not None
                found = Pack(self._read(pack), self._read(inode), self.budget)
                self.packs[stem] = (found, packs, stem)
        if sum(len(pack.offsets) for pack, _, _ in self.packs.values()) > OBJECTS_MAX:
            raise TooMuch("git objects in packs")

    def _packed(self) -> set[bytes]:
        return {id for pack, _, _ in self.packs.values() for id in pack.offsets}

    def _read(self, inode: Inode) -> bytes:
        """A file's bytes: within the bound whatever size a sparse one claims."""
        self.read_bytes += inode.size
        if self.read_bytes > READ_BYTES_MAX:
            raise TooMuch(f"git objects ({READ_BYTES_MAX >> 20} MiB are not)")
        self.budget.unpack(inode.size)
        return content(inode)

    def _object(self, id: bytes) -> Object | None:
        """An object of the tree; ``None``: it is below."""
        if id in self.loose:
            holder, name = self.loose[id]
            item = gitobjects.loose(self._read(holder.children[name]), self.budget)
            if item.id != id:
                raise ValueError("an object under another one's id")
            return item
        for pack, _, _ in self.packs.values():
            if id in pack.offsets:
                return pack.read(id)
        return None

    # -- what stays ---------------------------------------------------------------------

    def _gone(self) -> set[bytes]:
        """The objects here that neither HEAD nor an index reaches."""
        places = [b""]
        trees = self._at(b"worktrees")
        places += [b"worktrees/%s/" % name for name in (trees.children if trees else ())]
        left = self.loose.keys() | self._packed()  # no more ids than there are objects here
        todo: list[bytes] = []

        def keep(ids: Iterable[tuple[bytes, bool]]) -> None:
            for id, leaf in ids:
                if id in left:
                    left.remove(id)
                    if not leaf:
                        todo.append(id)

        for place in places:
            keep((id, False) for id in self._head(place + b"HEAD"))
            index = self._at(place + b"index")
            if index is not None and index.is_regular:
                keep((id, True) for id in gitobjects.staged(self._read(index)))
        while todo:
            item = self._object(todo.pop())
            keep(item.needs() if item is not None else ())
        return left

    def _head(self, name: bytes) -> list[bytes]:
        for _ in range(SYMBOLIC_MAX):
            text = (self._text(name) or b"").strip()
            if not text.startswith(b"ref:"):
                return [bytes.fromhex(text.decode())] if text else self._from_packed_refs(name)
            name = text.removeprefix(b"ref:").strip()
        return []

    def _text(self, name: bytes) -> bytes | None:
        inode = self._at(name)
        if inode is None:
            return self.below(self.path + b"/" + name)
        return self._read(inode) if inode.is_regular else None

    def _from_packed_refs(self, name: bytes) -> list[bytes]:
        for line in (self._text(b"packed-refs") or b"").splitlines():
            id, _, ref = line.partition(b" ")
            if ref == name:
                return [bytes.fromhex(id.decode())]
        return []

    # -- what goes ----------------------------------------------------------------------

    def _remove(self, holder: Inode, name: bytes, place: bytes) -> None:
        inode = holder.children.get(name)
        if inode is not None and not inode.is_whiteout:
            del holder.children[name]
            self.report.add(self.path + b"/" + place + name, RULE, stored_bytes(inode))

    def _repack(self, stem: bytes, gone: set[bytes]) -> None:
        pack, holder, _ = self.packs[stem]
        stays = pack.offsets.keys() - gone
        if stays == pack.offsets.keys():
            return
        like = holder.children[stem + b".pack"]
        for name in [n for n in holder.children if n.rpartition(b".")[0] == stem]:
            self._remove(holder, name, b"objects/pack/")
        self._remove(holder, b"multi-pack-index", b"objects/pack/")
        if stays:
            data, idx, name_ = gitobjects.written(stays, pack.read, self.budget)
            for kind, made in ((".pack", data), (".idx", idx)):
                holder.children[(name_ + kind).encode()] = file(made, like)

    def _unname(
        self, at: Inode | None, place: bytes, gone: set[bytes], only: bytes = b""
    ) -> None:
        """Refs to what is gone."""
        for name, inode in list(at.children.items()) if at is not None else ():
            if inode.is_dir and not only:
                self._unname(inode, place + name + b"/", gone)
            elif inode.is_regular and name.endswith(only) and at is not None:
                text = self._read(inode)[:_ID_DIGITS]
                with contextlib.suppress(ValueError):
                    if bytes.fromhex(text.decode("ascii")) in gone:
                        self._remove(at, name, place)

    def _packed_refs(self, gone: set[bytes]) -> None:
        inode = self._at(b"packed-refs")
        if inode is None or not inode.is_regular:
            return
        lines, drop = [], False
        for line in self._read(inode).splitlines(keepends=True):
            if not line.startswith((b"^", b"#")):
                drop = bytes.fromhex(line[:_ID_DIGITS].decode("ascii")) in gone
                if drop:
                    self.report.add(self.path + b"/" + line[41:].strip(), RULE, 0)
            if not drop or line.startswith(b"#"):
                lines.append(line)
        self.folder.children[b"packed-refs"] = file(b"".join(lines), inode)


def content(inode: Inode) -> bytes:
    """A regular file's bytes."""
    out = bytearray(inode.size)
    source = inode.source
    for extent in inode.extents:
        at = 0
        while source is not None and at < extent.length:
            piece = source.pread(extent.length - at, extent.source_offset + at)
            if not piece:
                raise ValueError("a file became shorter")
            out[extent.offset + at : extent.offset + at + len(piece)] = piece
            at += len(piece)
    if source is not None:
        source.close()
    return bytes(out)


def file(data: bytes, like: Inode) -> Inode:
    """A file of ``data`` with the owner, mode and time of another one."""
    return Inode(
        stat.S_IFREG | stat.S_IMODE(like.mode), uid=like.uid, gid=like.gid,
        mtime_ns=like.mtime_ns, size=len(data), source=_Bytes(data),
        extents=(Extent(0, len(data), 0),) if data else (),
    )  # fmt: skip
