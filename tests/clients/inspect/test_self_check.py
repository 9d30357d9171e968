"""Inspect's own checks of a provider, all of them, with no known failures."""

from __future__ import annotations

from inspect_ai.util._sandbox import self_check
from inspect_ai.util._sandbox.self_check import *  # noqa: F403

CHECKS = 44
"""As many as the pinned version has: fewer means that some were not collected."""


def test_every_check_is_there() -> None:
    assert len(self_check.__all__) == CHECKS
    assert set(self_check.__all__) <= set(globals())
