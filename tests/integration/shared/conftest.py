"""A connected bus on the shared stack."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from shared.bus import Bus
from tests.integration.conftest import Stack


@pytest.fixture
async def bus(stack: Stack) -> AsyncIterator[Bus]:
    made = Bus(stack.settings(), "test")
    await made.start()
    yield made
    await made.close()
