"""Programs that the kernel runs where their sections say, and what they tell.

Owns: opening an object file once, remembering that the kernel refuses it, reading its ring
of events on the running loop. Does not own: what is in maps and events (who uses it), the
library (:mod:`.libbpf`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from services.edge.egress.libbpf import Map, Programs, Ring
from shared.errors import Unavailable, Unsupported


class Listening:
    """Events of a ring are taken as they come, by the loop that runs now."""

    def __init__(self, ring: Ring) -> None:
        self._ring, self._loop = ring, asyncio.get_running_loop()
        self._loop.add_reader(ring.fd, ring.consume)

    def consume(self) -> None:
        """Takes what is there, now."""
        self._ring.consume()

    def close(self) -> None:
        """Takes nothing more, and gives the ring back. Once."""
        self._loop.remove_reader(self._ring.fd)
        self._ring.close()


class Hooks:
    """See the module. ``hooks`` are names of programs in the object file ``path``, ``take``
    is given each event of its map ``events``."""

    def __init__(self, path: Path, hooks: Sequence[str], take: Callable[[bytes], None]) -> None:
        self._path, self._hooks, self._take = path, hooks, take
        self._programs: Programs | None = None
        self._refused: Unsupported | None = None
        self._listening: Listening | None = None

    def open(self) -> bool:
        """Loads and attaches the programs; whether it did, and they were not before. Raises
        ``Unsupported``, the same again without another try, or ``Unavailable`` where they
        are not built."""
        if self._refused is not None:
            raise self._refused
        if self._programs is not None:
            return False
        if not self._path.exists():
            raise Unavailable(f"{self._path.name} is not built (make -C guest bpf, needs clang)")
        try:
            self._programs = _attached(self._path, self._hooks)
        except Unsupported as err:
            self._refused = err
            raise
        return True

    def map(self, name: str) -> Map:
        """A map of programs that are open."""
        assert self._programs is not None
        return self._programs.map(name)

    def listen(self) -> None:
        """Events are taken from here on. Again is fine."""
        if self._listening is None:
            assert self._programs is not None
            self._listening = Listening(self._programs.ring(self.map("events"), self._take))

    def consume(self) -> None:
        """Takes the events that are there, now."""
        if self._listening is not None:
            self._listening.consume()

    def close(self) -> None:
        """The programs go. Those that are not open are fine."""
        if self._listening is not None:
            self._listening.close()
            self._listening = None
        if self._programs is not None:
            self._programs.close()
            self._programs = None


def _attached(path: Path, hooks: Sequence[str]) -> Programs:
    programs = Programs(path)
    try:
        for hook in hooks:
            programs.attach_hook(hook)
    except BaseException:
        programs.close()  # else those before it ran on
        raise
    return programs
