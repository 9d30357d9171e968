"""Python's search for cycles of garbage while large trees are made.

Owns: how rarely it searches meanwhile. Why: an import makes some ten objects an entry, all of
which it keeps; looking through them again and again took a seventh of its time.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

RARELY = 50_000
"""New objects between two searches; Python's own measure is 700."""

_lock = threading.Lock()
_usual: list[int] = []
"""The measure to go back to, once for each who is within."""


@contextmanager
def searched_rarely() -> Iterator[None]:
    """For the whole process, while anyone is within."""
    with _lock:
        young, *older = gc.get_threshold()
        _usual.append(_usual[0] if _usual else young)
        gc.set_threshold(RARELY if young else young, *older)
    try:
        yield
    finally:
        with _lock:
            young, *older = gc.get_threshold()
            usual = _usual.pop()
            gc.set_threshold(young if _usual else usual, *older)
