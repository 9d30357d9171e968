"""The local side of copies: reading and writing this machine's files.

Owns: a file that appears only when it is whole, holes, a place in a directory that no
link leads out of, counting for progress. Does not own: which files.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from libdsec import _ids
from libdsec._bundle import ENTRY_BYTES_MAX, Entry
from libdsec._filecalls import FileCalls, persistent
from libdsec._treeplan import Item, left_out, shared_names, special
from libdsec._wire import CHUNK_BYTES
from libdsec.errors import FileChanged, InvalidRequest, NotARegularFile

OnBytes = Callable[[int], None]
"""Called with the bytes of each chunk as it is taken over; with a negative number when a
file begins again."""
ZEROS = bytes(256 * 1024)


class Taken:
    """Tells ``on_progress`` what was taken over, and takes it back."""

    def __init__(self, on_progress: OnBytes | None) -> None:
        self._tell, self._count = on_progress, 0

    def __call__(self, count: int) -> None:
        self._count += count
        if self._tell is not None and count:
            self._tell(count)

    def back(self) -> None:
        """The same bytes are going to come again."""
        self(-self._count)

    def part(self) -> Taken:
        """The same for one file of several."""
        return Taken(self)


def put(sink: BinaryIO, data: bytes) -> None:
    """Writes a chunk; one of zeros becomes a hole. The caller sets the size at the end."""
    if data == ZEROS[: len(data)]:
        sink.seek(len(data), os.SEEK_CUR)
    else:
        sink.write(data)


async def upload(
    calls: FileCalls, source: BinaryIO, remote: str, *, user: str | None, report: Taken,
    mode: int | None = None, mtime_ns: int | None = None,
) -> int:  # fmt: skip
    """One open file in chunks. Bytes written. Raises ``FileChanged`` where it does not hold
    still for long enough."""
    first = os.fstat(source.fileno())
    facts = {
        "user": user, "mtime_ns": mtime_ns,
        "mode": stat.S_IMODE(first.st_mode) if mode is None else mode,
        "sparse": first.st_blocks * 512 < first.st_size,
    }  # fmt: skip

    async def chunks() -> AsyncIterator[bytes]:
        report.back()
        source.seek(0)
        before = left, _ = state_of(source)
        while data := await asyncio.to_thread(source.read, min(CHUNK_BYTES, left)):
            left -= len(data)
            yield data
            report(len(data))
        if state_of(source) != before:
            name = str(source.name)
            raise FileChanged(f"{name} changed while it was copied", path=name)

    return await persistent(lambda: calls.input("file_write", remote, chunks, **facts))


def state_of(source: BinaryIO) -> tuple[int, int]:
    """Size, and time of the last change."""
    facts = os.fstat(source.fileno())
    return facts.st_size, facts.st_mtime_ns


async def download(
    calls: FileCalls, remote: str, target: Path, *, user: str | None, report: Taken,
    entry: Entry | None = None,
) -> int:  # fmt: skip
    """One file in chunks; ``entry`` says mode and time. Bytes read."""
    part = _beside(target)

    async def attempt() -> int:
        report.back()
        count = 0
        with part.open("wb") as sink:
            async for data in calls.content(remote, user=user):
                await asyncio.to_thread(put, sink, data)
                count += len(data)
                report(len(data))
            sink.truncate(count)
            _dress(sink, entry)
        return count

    try:
        count = await persistent(attempt)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
    return count


def regular_or_free(target: Path) -> None:
    """Raises ``NotARegularFile`` where the place is taken by something that no file may
    replace."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        mode = target.lstat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode) or stat.S_ISDIR(mode)):
            raise NotARegularFile(f"{target} is no regular file", path=str(target))


def _beside(target: Path) -> Path:
    """A free name next to ``target``, whose place may be taken by a file or a link only."""
    regular_or_free(target)
    return target.with_name(f".{_ids.new()}.part")  # the name itself may be of full length


def _dress(sink: BinaryIO, entry: Entry | None) -> None:
    if entry is None:
        return
    sink.flush()
    os.fchmod(sink.fileno(), entry.mode & 0o777)  # no set-user-id from a sandbox
    if entry.mtime_ns is not None:
        os.utime(sink.fileno(), ns=(entry.mtime_ns, entry.mtime_ns))


class Place:
    """A local directory into which names of a sandbox are laid out."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._safe: set[Path] = set()

    def at(self, name: str) -> Path:
        """Where ``name`` goes; its parents are made. Raises ``InvalidRequest`` where one
        of them is a link: nothing is written through it."""
        target = self.root / name
        self.folder(PurePosixPath(name).parent)
        return target

    def folder(self, name: PurePosixPath | str) -> Path:
        """The directory ``name``, made where it is missing."""
        path = self.root / name
        if path in self._safe:
            return path
        if path != self.root:
            self.folder(PurePosixPath(name).parent)
            if path.is_symlink():
                raise InvalidRequest(f"{path} is a link, not a directory", field="local")
        path.mkdir(parents=path == self.root, exist_ok=True)
        self._safe.add(path)
        return path

    def write(self, entries: Sequence[Entry]) -> None:
        """Small files, each as a whole."""
        for entry in entries:
            target = self.at(entry.name)
            part = _beside(target)
            try:
                with part.open("xb") as sink:
                    sink.write(entry.content)
                    _dress(sink, entry)
                part.replace(target)
            finally:
                part.unlink(missing_ok=True)

    def link(self, name: str, target: str, *, symbolic: bool) -> None:
        """A link, in the place of what was there."""
        path = self.at(name)
        part = _beside(path)
        try:
            if symbolic:
                part.symlink_to(target)
            else:
                part.hardlink_to(self.at(target))
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)


def open_regular(path: Path, *, follow: bool = False) -> BinaryIO:
    """Opens a file to be read, never something else, through a link only if told to."""
    more = os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    source = open(  # noqa: SIM115 - the caller closes it
        path, "rb", opener=lambda name, flags: os.open(name, flags | more)
    )
    if not stat.S_ISREG(os.fstat(source.fileno()).st_mode):
        source.close()
        raise NotARegularFile(f"{path} is no regular file", path=str(path))
    return source


def read_small(path: Path, name: str) -> Entry:
    """A file as it is now, for a bundle."""
    with open_regular(path) as source:
        facts = os.fstat(source.fileno())
        data = source.read(ENTRY_BYTES_MAX // 2 + 1)
        if len(data) > ENTRY_BYTES_MAX // 2:
            raise FileChanged(f"{path} grew while it was copied", path=str(path))
        return Entry("f", name, facts.st_mode & 0o7777, facts.st_mtime_ns, content=data)


def scan(root: Path, exclude: Sequence[str]) -> list[Item]:
    """What is below a local directory, parents first. Raises ``InvalidRequest`` for a root
    that is no directory, ``NotARegularFile`` for what cannot be copied."""
    if not root.is_dir():
        raise InvalidRequest(f"{root} is no directory", field="local")
    return shared_names(list(_scan(root, "", exclude)))


def _scan(root: Path, below: str, exclude: Sequence[str]) -> Iterator[Item]:
    with os.scandir(root / below) as found:
        entries = sorted(found, key=lambda e: e.name)
    for entry in entries:
        name = below + entry.name
        if left_out(name, exclude):
            continue
        facts = entry.stat(follow_symlinks=False)
        mode, time_ns = stat.S_IMODE(facts.st_mode), facts.st_mtime_ns
        if stat.S_ISDIR(facts.st_mode):
            yield Item(name, "d", 0, mode, time_ns)
            yield from _scan(root, name + "/", exclude)
        elif stat.S_ISLNK(facts.st_mode):
            yield Item(name, "l", 0, 0o777, time_ns, os.readlink(entry.path))
        elif stat.S_ISREG(facts.st_mode):
            id = (facts.st_dev, facts.st_ino) if facts.st_nlink > 1 else None
            yield Item(name, "f", facts.st_size, mode, time_ns, id=id)
        else:
            raise special(entry.path)
