"""What burst asked for ends with burst."""

from __future__ import annotations

from typing import Any, cast

import pytest

from services.burst.settings import Settings as BurstSettings
from services.scheduler import fleet as module
from services.scheduler.fleet import Fleet
from services.scheduler.settings import Settings


def test_the_share_counts_until_burst_has_been_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    nothing = cast("Any", None)
    fleet = Fleet(nothing, nothing, 1.0, share_s=90.0)
    assert fleet.cloud_share == 0.0
    fleet.burst(0.4)
    now += 89.0
    assert fleet.cloud_share == 0.4
    fleet.burst(7.0)  # a portion at most
    now += 89.0
    assert fleet.cloud_share == 1.0
    now += 1.0
    assert fleet.cloud_share == 0.0
    fleet.burst(0.2)
    assert fleet.cloud_share == 0.2


def test_a_repetition_of_burst_may_be_lost() -> None:
    repeat_s = BurstSettings(pg_dsn="").burst_publish_s
    assert Settings(pg_dsn="", redis_url="").burst_share_s >= 2 * repeat_s
