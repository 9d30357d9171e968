"""Putting marks on what is watched in one sandbox. Blocking.

Owns: finding it, folders with what is in them, bounds. Does not own: what comes of it
(:mod:`.watching`).
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from services.edge.policy.watched import PROGRAM, Watched
from services.edge.sensors import fanotify, inotify
from services.edge.sensors.inside import find, is_laid_over, mount_of, root_of
from shared.errors import InvalidRequest

log = logging.getLogger(__name__)

FILES_MAX = 1024
"""Of one watched folder, folders in it included; what is beyond is not watched."""
BY_THE_WAY = ("__pycache__", ".pytest_cache")
"""What a run of tests leaves beside them."""


@dataclass(frozen=True, slots=True)
class Mark:
    """``path`` by its name in the sandbox, ``watch`` of a file or a folder."""

    what: Watched
    path: str
    mount: int
    watch: int | None = None


def by_the_way(name: str) -> bool:
    """Whether ordinary work makes such an entry."""
    return name in BY_THE_WAY or name.endswith(".pyc")


class _Folders:
    """Folders of programs: most of what is looked for is in none, and in many images two names
    lead to one folder. To be closed."""

    def __init__(self, root: int) -> None:
        self._root = root
        self._known: dict[str, int | None] = {}
        self._met: set[tuple[int, int]] = set()

    def may_have(self, one: Watched) -> bool:
        """Whether something can be there that was not found under another name."""
        if one.kind != "file" or one.rule != PROGRAM:
            return True
        folder, name = os.path.split(one.path)
        if folder not in self._known:
            self._known[folder] = self._new(folder)
        at = self._known[folder]
        if at is None:
            return False
        try:
            os.stat(name, dir_fd=at, follow_symlinks=False)
        except OSError:
            return False
        return True

    def _new(self, folder: str) -> int | None:
        try:
            at = find(self._root, folder)
        except OSError:
            return None
        found = os.fstat(at)
        key = (found.st_dev, found.st_ino)
        held = os.fstatvfs(at).f_flag & os.ST_RDONLY  # nothing there changes
        if held or key in self._met:
            os.close(at)
            return None
        self._met.add(key)
        return at

    def close(self) -> None:
        for at in self._known.values():
            if at is not None:
                os.close(at)


class Marking:
    """See the module; ``group`` and ``watches`` are the node's."""

    def __init__(self, group: fanotify.Group, watches: inotify.Watches) -> None:
        self._group, self._watches = group, watches

    def mark(self, pid: int, what: Sequence[Watched], *, anew: bool) -> list[Mark]:
        """Marks in the root of the process ``pid``. Raises ``InvalidRequest`` for what must
        be there and is not, unless it is watched ``anew``."""
        try:
            root = root_of(pid)
        except OSError:
            return []  # it is over
        seen = _Folders(root)
        try:
            there = [one for one in what if one.required or seen.may_have(one)]
            return [mark for one in there for mark in self._all(root, one, anew)]
        finally:
            seen.close()
            os.close(root)

    def _all(self, root: int, one: Watched, anew: bool) -> Iterator[Mark]:
        for link in (False, True) if one.kind == "file" else (False,):
            try:
                at = find(root, one.path, link=link)
            except OSError as err:
                if one.required and not anew:
                    text = f"the policy's {one.path} is not there: {err.strerror}"
                    raise InvalidRequest(text, field="policy.files", cause="invalid") from err
                return
            try:
                yield from self._one(at, one, link=link)
            except OSError as err:
                log.warning("%s is not watched: %s", one.path, err)
            finally:
                os.close(at)

    def _one(self, at: int, one: Watched, *, link: bool) -> Iterator[Mark]:
        mode = os.fstat(at).st_mode
        if one.kind == "mount":
            if is_laid_over(at):
                folders = fanotify.ON_FOLDERS if one.denied else 0
                self._group.mark(at, fanotify.OPEN | folders, mount=True)
                yield Mark(one, one.path, mount_of(at))
        elif link:
            if stat.S_ISLNK(mode):  # else it is watched as what it is
                yield self._mark(at, one, one.path, inotify.MASK)
        elif stat.S_ISDIR(mode):
            yield from self._folder(at, one)
        else:
            yield self._file(at, one, one.path)

    def _file(self, at: int, one: Watched, path: str) -> Mark:
        self._group.mark(at, fanotify.MODIFY, mount=False)
        return self._mark(at, one, path, inotify.MASK)

    def _mark(self, at: int, one: Watched, path: str, mask: int) -> Mark:
        return Mark(one, path, mount_of(at), self._watches.add(at, mask))

    def _folder(self, at: int, one: Watched) -> Iterator[Mark]:
        top = os.open(f"/proc/self/fd/{at}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        left = FILES_MAX
        try:
            for below, folders, names, here in os.fwalk(".", dir_fd=top):
                folders[:] = [name for name in folders if not by_the_way(name)]
                path = os.path.normpath(os.path.join(one.path, below))
                yield self._mark(here, one, path, inotify.IN_FOLDER)
                for name in names:
                    left -= 1
                    if left > 0 and not by_the_way(name):
                        yield self._entry(here, one, path, name)
                if left <= 0:
                    log.warning("not all of %s is watched", one.path)
                    return
        finally:
            os.close(top)

    def _entry(self, here: int, one: Watched, path: str, name: str) -> Mark:
        flags = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
        at = os.open(name, flags, dir_fd=here)
        try:
            if stat.S_ISREG(os.fstat(at).st_mode):
                return self._file(at, one, f"{path}/{name}")
            return self._mark(at, one, f"{path}/{name}", inotify.MASK)
        finally:
            os.close(at)
