"""One event loop in a thread of its own, for code that has none.

Owns: the thread, calls into it, its end at interpreter exit. Does not own: what runs
there. The caller's own loop, if it has one (a notebook's), is never touched.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

END_S = 15.0
"""How long the interpreter's exit waits for open clients to close."""


class Portal:
    """Runs coroutines on its loop and waits for them."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="libdsec", daemon=True)
        self._thread.start()
        self.pid = os.getpid()

    def __repr__(self) -> str:
        return f"Portal({'up' if self._thread.is_alive() else 'down'})"

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of ``work``. An interrupt (Ctrl-C) cancels it, waits for its
        clean-up and goes on to the caller."""
        if self.runs_here():
            work.close()
            raise RuntimeError("libdsec.sync was called from one of its own callbacks")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            if not future.done():
                future.cancel()
                concurrent.futures.wait([future], timeout=END_S)
            raise

    def runs_here(self) -> bool:
        """Whether this is its thread."""
        return threading.current_thread() is self._thread

    def end(self) -> None:
        """Cancels what runs and ends the thread. Bounded."""
        late = (TimeoutError, RuntimeError, concurrent.futures.CancelledError)
        with contextlib.suppress(*late):  # the thread is a daemon: the interpreter ends anyway
            asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop).result(END_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(END_S)


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=1.0)


def on_portal() -> bool:
    """Whether this is the portal's own thread."""
    return _portal is not None and _portal.runs_here()


_lock = threading.Lock()
_portal: Portal | None = None


def portal() -> Portal:
    """The process's portal; a forked child makes its own."""
    global _portal
    with _lock:
        if _portal is None or _portal.pid != os.getpid():
            _portal = Portal()
            atexit.register(_portal.end)
        return _portal
