"""A sandbox as Inspect makes it, for the checks that want one.

Run by ``make test-inspect`` with Inspect's environment beside a running system.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio
from inspect_ai.util import SandboxEnvironment
from inspect_ai.util._sandbox.registry import registry_find_sandboxenv

CONFIG = str(Path(__file__).parent / "dsec.yaml")


@pytest_asyncio.fixture
async def sandbox_env() -> AsyncIterator[SandboxEnvironment]:
    """A fresh sandbox, through the provider's own life cycle and found by its name."""
    provider = registry_find_sandboxenv("dsec")
    await provider.task_init("checks", CONFIG)
    try:
        environments = await provider.sample_init("checks", CONFIG, {})
        yield environments["default"]
        await provider.sample_cleanup("checks", CONFIG, environments, False)
    finally:
        await provider.task_cleanup("checks", CONFIG, True)
