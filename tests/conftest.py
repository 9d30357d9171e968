"""What every test of this tree can rely on."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    # a shell that runs us in the background ignores SIGINT, and so would our children
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
