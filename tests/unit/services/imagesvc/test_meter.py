"""Imports that would never end."""

from __future__ import annotations

import time

import pytest

from services.imagesvc.meter import Meter
from shared.errors import DeadlineExceeded


def test_an_import_that_goes_on_without_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [time.monotonic()]
    monkeypatch.setattr("services.imagesvc.meter.time.monotonic", lambda: now[0])
    meter = Meter(None, lambda: False, seconds_max=11)
    now[0] += 10
    meter.advance(1)
    now[0] += 2
    with pytest.raises(DeadlineExceeded):
        meter.advance(1)
