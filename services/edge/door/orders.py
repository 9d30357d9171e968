"""What a client orders for a running command: signals, sizes of its terminal. Pure.

Owns: reading them, their order, the bound of those that nobody takes yet.
"""

from __future__ import annotations

from collections.abc import Callable

from services.edge.drivers.base import Resize
from shared.errors import InvalidRequest

MAX_WAITING = 64
SIGNALS = frozenset(
    {
        "0", "HUP", "INT", "QUIT", "KILL", "USR1", "USR2", "TERM", "CONT", "STOP", "TSTP",
        "TTIN", "TTOU", "WINCH", "PIPE", "ALRM",
    }
)  # fmt: skip

Order = str | Resize


class Orders:
    """In the order in which they came; kept until somebody takes them."""

    def __init__(self) -> None:
        self._waiting: list[Order] = []
        self._take: Callable[[Order], None] | None = None

    def put(self, order: Order) -> None:
        """Raises ``InvalidRequest`` where too many wait."""
        if self._take is not None:
            self._take(order)
            return
        for at, earlier in enumerate(self._waiting):
            if isinstance(order, Resize) and isinstance(earlier, Resize):
                self._waiting[at] = order  # the newest of those that wait is enough
                return
        if len(self._waiting) >= MAX_WAITING:
            raise InvalidRequest("too many signals wait", field="signal")
        self._waiting.append(order)

    def give_to(self, take: Callable[[Order], None]) -> None:
        """``take`` gets what waits now, and each one that comes from here on."""
        self._take = take
        waiting, self._waiting = self._waiting, []
        for order in waiting:
            take(order)


    def end(self) -> None:
        """Nobody takes them any more. Who did refers to the operation, and it to this: a
        circle that only the collector would find."""
        self._take = _nobody


def _nobody(_order: Order) -> None:
    return


def signal_of(data: bytes) -> str:
    """The name of a signal without SIG. Raises ``InvalidRequest``."""
    name = data.decode("ascii", "replace").upper().removeprefix("SIG")
    if name not in SIGNALS:
        raise InvalidRequest(f"signal {name[:20]!r} is unknown", field="signal")
    return name


def size_of(data: bytes) -> Resize:
    """A size of a terminal: rows, space, columns. Raises ``InvalidRequest``."""
    rows, sign, cols = data.partition(b" ")
    size = Resize(count_of(rows), count_of(cols if sign else b""))
    if not (0 < size.rows < 1 << 16 and 0 < size.cols < 1 << 16):
        raise InvalidRequest("a terminal's size is out of bounds", field="pty")
    return size


def count_of(data: bytes) -> int:
    """A decimal number. Raises ``InvalidRequest``."""
    try:
        return int(data)
    except ValueError:
        raise InvalidRequest("a count is a decimal number", field="count") from None
