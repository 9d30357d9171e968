"""What every test of this tree can rely on.

Property tests try the same examples every time, so that a run can be repeated; with
``DSEC_FUZZ=1`` (or ``--hypothesis-profile=search``) they really search.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from hypothesis import settings

SEARCH_EXAMPLES = 5000

settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.register_profile("search", max_examples=SEARCH_EXAMPLES, deadline=None)
settings.load_profile("search" if os.environ.get("DSEC_FUZZ") == "1" else "repeatable")


def pytest_configure() -> None:
    # a shell that runs us in the background ignores SIGINT, and so would our children
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With several workers, what shares a system or a machine-wide fixture runs on one."""
    here = Path(__file__).parent
    for item in items:
        parts = item.path.relative_to(here).parts
        if parts[0] not in ("unit", "architecture"):
            name = parts[1] if parts[0] == "integration" else parts[0]
            item.add_marker(pytest.mark.xdist_group(name))
