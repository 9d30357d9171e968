"""How often an edge looks for what came, where it has to wait for a CPU itself.

Owns: when it looks less often, and how much less. Does not own: what comes.

On a machine whose cores are all taken, an edge that wakes up for each message takes a core
from a command each time, and so do the server and the client that it answers. Looking every
few milliseconds instead it does, and they do, several messages at once: a command costs all
three a quarter less CPU, and the slowest of many commands comes sooner (docs/adr/0036).
Where a core is free, or few ask, it looks at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

WINDOW_S = 0.05
"""Judged again this often."""
MESSAGES_PER_S = 1000.0
"""Fewer are no crowd."""
WAITED_SHARE = 0.2
"""Of the time, that the edge could run and had no CPU."""
MANY = 16
"""Operations in flight; fewer would wait for each other's turns."""
PAUSE_EACH_S, PAUSE_MAX_S = 60e-6, 0.004

_SCHEDSTAT = Path("/proc/thread-self/schedstat")


def pause_s(*, messages: int, waited_s: float, seconds: float, in_flight: int) -> float:
    """How long after a look the next one is due, after ``seconds`` in which so many messages
    came and the edge waited so long for a CPU."""
    crowd = messages >= MESSAGES_PER_S * seconds and in_flight >= MANY
    if not crowd or waited_s < WAITED_SHARE * seconds:
        return 0.0
    return min(in_flight * PAUSE_EACH_S, PAUSE_MAX_S)


def waited() -> float:
    """Seconds that this thread could have run and did not. 0 where the kernel does not count."""
    try:
        return int(_SCHEDSTAT.read_bytes().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


class Pacing:
    """Told of each message; holds the event loop up between two looks where that is due."""

    def __init__(
        self, *, waited: Callable[[], float] = waited, now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:  # fmt: skip
        self._waited, self._now, self._sleep = waited, now, sleep
        self._messages = 0
        self._since, self._waited_s = now(), waited()
        self._looked = 0.0
        self._pause_s = 0.0
        self._asked = False

    def came(self, in_flight: int) -> None:
        """A message, while so many operations are in flight."""
        self._messages += 1
        if self._asked:
            return
        now = self._now()
        if now - self._since >= WINDOW_S:
            self._judge(now, in_flight)
        if self._pause_s:  # where it is not due the loop has no turn more
            self._asked = True
            asyncio.get_running_loop().call_soon(self._handled)

    def _handled(self) -> None:
        """What came is handled; the answers are written in this turn."""
        self._asked = False
        asyncio.get_running_loop().call_soon(self._rest)

    def _judge(self, now: float, in_flight: int) -> None:
        waited_s = self._waited()
        self._pause_s = pause_s(
            messages=self._messages, waited_s=waited_s - self._waited_s,
            seconds=now - self._since, in_flight=in_flight,
        )  # fmt: skip
        self._messages, self._since, self._waited_s = 0, now, waited_s

    def _rest(self) -> None:
        left_s = self._looked + self._pause_s - self._now()
        if left_s > 0:
            self._sleep(left_s)  # the whole loop: it is what wakes up too often
        self._looked = self._now()
