"""Directories copied: small files many in a call, large ones one by one, with bounded
concurrency and memory.

Owns: what is copied in which order. Does not own: what is copied at all
(:mod:`libdsec._treeplan`), the bundle's format (:mod:`libdsec._bundle`), local files
(:mod:`libdsec._local`), calls (:mod:`libdsec._filecalls`).

Order: directories that can be written to, files, then links, and at last the modes of
directories, so that nothing is written through a link or into what is read-only.
"""

from __future__ import annotations

import asyncio
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from libdsec import _bundle, _local, _workspace
from libdsec._bundle import SMALL_BYTES, Entry
from libdsec._filecalls import FileCalls, info_of, persistent
from libdsec._local import Place, Taken
from libdsec._treeplan import BUNDLE_FILES, Item, batches, leads_outside, remote_items, same
from libdsec._wire import FileReply
from libdsec.errors import FileChanged, FileNotFound, InternalError, InvalidRequest
from libdsec.results import FileInfo, TreeCopy

CONCURRENT = 4
"""Bundles and large files under way at once."""
WRITABLE = 0o700

OutsideLinks = Literal["refuse", "skip", "keep"]


# -- into a sandbox --------------------------------------------------------------------


async def upload(
    calls: FileCalls, local: Path, remote: str, *, user: str | None,
    exclude: Sequence[str], skip_same: bool, report: Taken,
) -> TreeCopy:  # fmt: skip
    """See :meth:`libdsec.files.Files.upload_tree`."""
    found = await asyncio.to_thread(_local.scan, local, exclude)
    known = await _there(calls, remote, found, user=user) if skip_same else {}
    files = [i for i in found if i.kind == "f"]
    wanted = [i for i in files if not same(i, known.get(i.name))]
    dirs = [i for i in found if i.kind == "d"]
    links = [i for i in found if i.kind in "lh" and not same(i, known.get(i.name))]

    async def lay_out(entries: Sequence[Entry]) -> int:
        data = b"".join(map(_bundle.pack, entries))
        await calls.put("file_unpack", remote, data, user=user)
        return sum(len(e.content) for e in entries)

    async def small(batch: Sequence[Item]) -> int:
        read = lambda: [_local.read_small(local / i.name, i.name) for i in batch]  # noqa: E731
        count = await lay_out(await asyncio.to_thread(read))
        report(count)
        return count

    async def large(item: Item) -> int:
        with _local.open_regular(local / item.name) as source:
            return await _local.upload(
                calls, source, f"{remote}/{item.name}", user=user, mtime_ns=item.mtime_ns,
                report=report.part(),
            )  # fmt: skip

    await _all(lay_out, [i.entry(mode=i.mode | WRITABLE) for i in dirs])
    count = await _files(wanted, small, large)
    await _all(lay_out, [i.entry() for i in links])
    await _all(lay_out, [i.entry() for i in reversed(dirs) if i.mode != i.mode | WRITABLE])
    return TreeCopy(len(wanted), count, len(files) - len(wanted))


async def _there(
    calls: FileCalls, remote: str, items: Sequence[Item], *, user: str | None
) -> dict[str, Item]:
    """What is at the target already by the names of ``items``."""
    found: dict[str, Item] = {}

    async def ask(batch: Sequence[Item]) -> int:
        async for entries in _bundled(calls, remote, batch, user=user, length=0):
            found.update({e.name: Item(e.name, e.kind, e.size, e.mode, e.mtime_ns or 0, e.target)
                          for e in entries})  # fmt: skip
        return 0

    named = [Item(i.name, i.kind) for i in items if i.kind in "fl"]
    try:
        await _bounded(partial(ask, batch) for batch in batches(named))
    except FileNotFound:
        return {}  # there is no such directory
    return found


async def _bundled(
    calls: FileCalls, root: str, batch: Sequence[Item], *, user: str | None,
    length: int | None = None,
) -> AsyncIterator[list[Entry]]:  # fmt: skip
    """The bundle of these names. What was not asked for is not taken."""
    missing, parser = {item.name for item in batch}, _bundle.Unbundler()
    asked = _bundle.names([item.name for item in batch])
    async for part in calls.output("file_pack", root, data=asked, user=user, length=length):
        if isinstance(part, FileReply):
            break
        entries = parser.feed(part)
        for entry in entries:
            if entry.name not in missing:
                raise InternalError(f"the sandbox sends {entry.name!r}, which was not asked for")
            missing.remove(entry.name)
        yield entries
    parser.close()
    if missing and length is None:
        raise FileChanged(f"{root}/{min(missing)} did not come", path=f"{root}/{min(missing)}")


async def _stat(calls: FileCalls, path: str, *, user: str | None) -> FileInfo:
    reply = await calls.call("file_stat", path, user=user)
    if reply.entry is None:
        raise InternalError(f"{path}: the answer has no entry")
    return info_of(reply.entry)


async def _all(
    work: Callable[[Sequence[Entry]], Awaitable[int]], entries: Sequence[Entry]
) -> None:
    """In order; the first call makes the root where there is nothing else to do."""
    for start in range(0, max(len(entries), 1), BUNDLE_FILES):
        await work(entries[start : start + BUNDLE_FILES])


async def _files(
    files: Sequence[Item],
    small: Callable[[Sequence[Item]], Awaitable[int]],
    large: Callable[[Item], Awaitable[int]],
) -> int:
    """All files, a bounded number of calls at once. Bytes copied."""
    bundles = batches(i for i in files if i.size <= SMALL_BYTES)
    alone = (i for i in files if i.size > SMALL_BYTES)
    work = [partial(small, bundle) for bundle in bundles]
    return await _bounded([*work, *(partial(large, item) for item in alone)])


async def _bounded(work: Iterable[Callable[[], Awaitable[int]]]) -> int:
    """Runs all, a bounded number at once; the first failure ends the rest."""
    gate, total = asyncio.Semaphore(CONCURRENT), 0

    async def one(start: Callable[[], Awaitable[int]]) -> None:
        nonlocal total
        try:
            count = await start()
            total += count
        finally:
            gate.release()

    try:
        async with asyncio.TaskGroup() as group:
            for start in work:
                await gate.acquire()
                group.create_task(one(start))
    except BaseExceptionGroup as group_error:
        raise group_error.exceptions[0] from None
    return total


# -- out of a sandbox ------------------------------------------------------------------


async def download(
    calls: FileCalls, remote: str, local: Path, *, user: str | None,
    exclude: Sequence[str], skip_same: bool, outside_links: OutsideLinks, report: Taken,
) -> TreeCopy:  # fmt: skip
    """See :meth:`libdsec.files.Files.download_tree`."""
    root = (await _stat(calls, remote, user=user)).path
    listed = await _workspace.entries(calls, remote, recursive=True, user=user)
    found, skipped_links = _judged(remote_items(root, listed, exclude), root, outside_links)
    place = Place(local)
    dirs = [i for i in found if i.kind == "d"]
    await asyncio.to_thread(_make, place, dirs)
    files = [i for i in found if i.kind == "f"]
    wanted = await asyncio.to_thread(_missing, place, files) if skip_same else files

    async def small(batch: Sequence[Item]) -> int:
        return await persistent(
            lambda: _fetch(calls, root, batch, place, user=user, report=report.part())
        )

    async def large(item: Item) -> int:
        return await _local.download(
            calls, f"{root}/{item.name}", place.at(item.name), user=user,
            report=report.part(), entry=item.entry(),
        )  # fmt: skip

    count = await _files(wanted, small, large)
    await asyncio.to_thread(_finish, place, [i for i in found if i.kind in "lh"], dirs)
    return TreeCopy(len(wanted), count, len(files) - len(wanted), tuple(skipped_links))


def _judged(
    items: list[Item], root: str, outside_links: OutsideLinks
) -> tuple[list[Item], list[str]]:
    """What is to be copied, and the links that are not."""
    outside = [i.name for i in items if i.kind == "l" and leads_outside(i.name, i.target)]
    if outside_links == "keep" or not outside:
        return items, []
    if outside_links == "refuse":
        raise InvalidRequest(
            f"{root}/{outside[0]} is a link out of the directory (see outside_links)",
            field="outside_links",
        )
    gone = set(outside)
    return [i for i in items if i.name not in gone], outside


def _make(place: Place, dirs: Sequence[Item]) -> None:
    place.folder(".")
    for item in dirs:
        path = place.folder(item.name)
        if stat.S_IMODE(path.stat().st_mode) & WRITABLE != WRITABLE:
            path.chmod(WRITABLE)


def _missing(place: Place, files: Sequence[Item]) -> list[Item]:
    return [i for i in files if not same(_as_kept(i), _local_item(place.at(i.name), i.name))]


def _as_kept(item: Item) -> Item:
    """What is left of a sandbox's file on this side."""
    return Item(item.name, item.kind, item.size, item.mode & 0o777, item.mtime_ns)


def _local_item(path: Path, name: str) -> Item | None:
    try:
        facts = path.lstat()
    except OSError:
        return None
    if not stat.S_ISREG(facts.st_mode):
        return None
    return Item(name, "f", facts.st_size, stat.S_IMODE(facts.st_mode), facts.st_mtime_ns)


async def _fetch(
    calls: FileCalls, root: str, batch: Sequence[Item], place: Place, *, user: str | None,
    report: Taken,
) -> int:  # fmt: skip
    """One bundle's files."""
    count = 0
    report.back()
    async for entries in _bundled(calls, root, batch, user=user):
        if any(entry.kind != "f" for entry in entries):
            raise InternalError("the sandbox sends what is no file where files were asked for")
        await asyncio.to_thread(place.write, entries)
        size = sum(len(e.content) for e in entries)
        report(size)
        count += size
    return count


def _finish(place: Place, links: Sequence[Item], dirs: Sequence[Item]) -> None:
    for item in links:
        place.link(item.name, item.target, symbolic=item.kind == "l")
    for item in reversed(dirs):
        (place.root / item.name).chmod(item.mode & 0o777)
