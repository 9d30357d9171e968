"""What every test of this tree can rely on.

Property tests try the same examples every time, so that a run can be repeated; with
``DSEC_FUZZ=1`` (or ``--hypothesis-profile=search``) they really search.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

SEARCH_EXAMPLES = 5000

settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.register_profile("search", max_examples=SEARCH_EXAMPLES, deadline=None)
settings.load_profile("search" if os.environ.get("DSEC_FUZZ") == "1" else "repeatable")


def pytest_configure() -> None:
    # a shell that runs us in the background ignores SIGINT, and so would our children
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What failed before it was run again, in full (``--reruns``): it passed or not, the
    first failure is a defect of the test or of what it tests."""
    for report in terminalreporter.stats.get("rerun", ()):
        terminalreporter.section(f"failed at first: {report.nodeid}")
        terminalreporter.write_line(str(report.longrepr))


class ByFolder(LoadScopeScheduling):
    """With several workers, what shares a system or a machine-wide fixture runs on one:
    a folder of integration tests, all of another kind; of pure tests a module."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        _, kind, *below = path.split("/")
        if kind in ("unit", "architecture"):
            return path
        return below[0] if kind == "integration" else kind


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFolder:
    return ByFolder(config, log)
