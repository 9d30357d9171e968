"""Talking to a program: send, wait for what it says, send.

Owns: what was said and not yet looked at, patterns, the errors of waiting. Does not own:
the program's streams (:mod:`libdsec.process`). It works on a terminal and on pipes alike:
patterns are looked for in bytes, whatever chunks they came in.

Nothing is read ahead: a program that says much while nobody expects anything waits, as
on any pipe, once the window of its stream is full.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from libdsec.args import Seconds, seconds
from libdsec.errors import ExpectEnded, ExpectTimeout, InvalidRequest
from libdsec.results import ExecResult

if TYPE_CHECKING:
    from libdsec.process import Process

EXPECT_S = 30.0
BUFFER_BYTES = 1024 * 1024
"""What is kept of output that no pattern matched; older bytes are dropped and counted."""
OVERLAP_BYTES = 64 * 1024
"""Longest match of a regular expression that is found across chunks."""

Pattern = str | bytes | re.Pattern[str] | re.Pattern[bytes]
"""Text or bytes stand for themselves; a compiled regular expression is one."""


@dataclass(frozen=True, slots=True)
class Found:
    """What was waited for. ``index`` of the pattern; ``before``: output since the last
    match up to this one; ``data``: what matched; ``match`` of a regular expression, over
    bytes; ``dropped``: bytes missing before ``before``, over the limit of the buffer."""

    index: int
    before: bytes
    data: bytes
    match: re.Match[bytes] | None = None
    dropped: int = 0

    @property
    def text(self) -> str:
        """``before`` as text: UTF-8, what is not becomes U+FFFD."""
        return self.before.decode("utf-8", "replace")


class Interaction:
    """A program that is talked to. ``async with`` kills it at the end, if it still runs.
    ``process`` is the command itself."""

    def __init__(self, process: Process, *, buffer_bytes: int = BUFFER_BYTES) -> None:
        if buffer_bytes < 1:
            raise InvalidRequest("a buffer holds at least one byte", field="buffer_bytes")
        self.process = process
        self._limit = buffer_bytes
        self._buffer = b""
        self._dropped = 0
        self._reading: asyncio.Task[bytes | None] | None = None
        self._ended = False

    def __repr__(self) -> str:
        return f"Interaction({self.process!r}, {len(self._buffer)} bytes unmatched)"

    async def send(self, data: bytes | str) -> None:
        """Sends input. Raises ``StdinClosed`` when the program has ended."""
        await self.process.write(data)

    async def sendline(self, line: bytes | str = "") -> None:
        """Sends a line and its end."""
        data = line.encode() if isinstance(line, str) else line
        await self.process.write(data + b"\n")

    async def sendcontrol(self, key: str) -> None:
        """Sends a key with Ctrl held, such as ``"c"`` or ``"["``: one byte, of which a
        terminal makes what it is set to."""
        code = ord(key.upper()) ^ 0x40 if len(key) == 1 and key.isascii() else 0x80
        if code >= 0x20 and code != 0x7F:
            raise InvalidRequest(f"there is no key Ctrl-{key}", field="key")
        await self.process.write(bytes([code]))

    async def sendeof(self) -> None:
        """End of input; on a terminal it is typed."""
        await self.process.close_stdin()

    async def expect(
        self, *patterns: Pattern | Sequence[Pattern], timeout: Seconds = EXPECT_S
    ) -> Found:
        """Waits for the first of ``patterns`` (several, or one list) in what the program
        says: of several that are there the one that begins first, of those the one that
        is listed first. Raises ``ExpectTimeout`` after ``timeout`` seconds, with what was
        said so far, which stays there for the next call; ``ExpectEnded`` when output ends
        without a match, with the rest of it."""
        needles = [_needle(p) for p in _listed(patterns)]
        if not needles:
            raise InvalidRequest("what is expected?", field="patterns")
        end = time.monotonic() + (seconds(timeout, "timeout") or 0.0)
        start = 0
        while True:
            found = self._search(needles, start)
            if found is not None:
                return found
            if self._ended:
                raise ExpectEnded("the output ended", before=self._take(len(self._buffer)))
            start = max(len(self._buffer) - OVERLAP_BYTES, 0)
            shift = self._dropped
            if not await self._more(end - time.monotonic()):
                shown = [p.pattern for p in needles]
                raise ExpectTimeout(f"none of {shown} came in time", before=self._buffer)
            start = max(start - (self._dropped - shift), 0)

    async def expect_end(self, *, timeout: Seconds = EXPECT_S) -> bytes:
        """Waits for the end of the program's output; what came since the last match, the
        last part of it where that is over the buffer's limit. Raises ``ExpectTimeout``."""
        end = time.monotonic() + (seconds(timeout, "timeout") or 0.0)
        while not self._ended:
            if not await self._more(end - time.monotonic()):
                raise ExpectTimeout("the output did not end in time", before=self._buffer)
        return self._take(len(self._buffer))

    async def wait(self, *, check: bool = False) -> ExecResult:
        """The program's result, once it has ended; its output is what :meth:`expect` and
        :meth:`expect_end` did not read."""
        return await self.process.wait(check=check)

    async def close(self) -> None:
        """Kills the program and all it started, if it still runs."""
        if self._reading is not None:
            self._reading.cancel()
        await self.process.__aexit__(None, None, None)

    async def __aenter__(self) -> Interaction:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.close()

    async def _more(self, wait_s: float) -> bool:
        """Waits for more output, or its end. A read that is under way stays so when time
        is up: nothing that it brings is lost."""
        if self._reading is None:
            self._reading = asyncio.create_task(self._read())
        await asyncio.wait({self._reading}, timeout=max(wait_s, 0.0))
        if not self._reading.done():
            return False
        reading, self._reading = self._reading, None
        data = reading.result()
        if data is None:
            self._ended = True
            return True
        self._buffer += data
        over = len(self._buffer) - self._limit
        if over > 0:
            self._dropped += over
            self._buffer = self._buffer[over:]
        return True

    async def _read(self) -> bytes | None:
        try:
            return await self.process.stdout.__anext__()
        except StopAsyncIteration:
            return None

    def _search(self, needles: Sequence[re.Pattern[bytes]], start: int) -> Found | None:
        best: tuple[int, int, re.Match[bytes]] | None = None
        for index, needle in enumerate(needles):
            match = needle.search(self._buffer, start)
            if match is not None and (best is None or match.start() < best[0]):
                best = match.start(), index, match
        if best is None:
            return None
        at, index, match = best
        dropped, self._dropped = self._dropped, 0
        before = self._buffer[:at]
        self._take(match.end())
        return Found(index, before, match.group(), match, dropped)

    def _take(self, count: int) -> bytes:
        taken, self._buffer = self._buffer[:count], self._buffer[count:]
        return taken


def _listed(patterns: Sequence[Pattern | Sequence[Pattern]]) -> list[Pattern]:
    found: list[Pattern] = []
    for given in patterns:
        found += [given] if isinstance(given, str | bytes | re.Pattern) else given
    return found


def _needle(pattern: Pattern) -> re.Pattern[bytes]:
    """A pattern over bytes. Raises ``InvalidRequest`` for nothing at all, which would be
    found everywhere."""
    if isinstance(pattern, re.Pattern):
        if isinstance(pattern.pattern, bytes):
            return re.compile(pattern.pattern, pattern.flags)
        return re.compile(pattern.pattern.encode(), pattern.flags & ~re.UNICODE)
    data = pattern.encode() if isinstance(pattern, str) else pattern
    if not data:
        raise InvalidRequest("an empty text is everywhere", field="patterns")
    return re.compile(re.escape(data))
