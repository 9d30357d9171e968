"""What the system cost this process: samples masked, work lost, requests made again.

Owns: the counts. Does not own: what is masked (an error's ``is_infra`` says so), the counts
of services (their health pages).

Beside :func:`counts` they are OpenTelemetry counters (``dsec.client.masked`` …, attribute
``what``) wherever the program has OpenTelemetry's metrics API loaded. No dependency here.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from typing import Any

WHAT = {
    "masked": ("verdict", "rollout"),
    "lost": ("sandbox",),
    "retried": ("operation", "request"),
}
"""Counters, and of what each is kept. A rollout is masked, where a verdict may have been
before: they are counted apart. A sandbox is lost where it ended by the infrastructure's
doing, once for each that this process has seen so."""

_lock = threading.Lock()
_counts: Counter[tuple[str, str]] = Counter()
_instruments: dict[str, Any] = {}


def counts() -> dict[str, dict[str, int]]:
    """Counter → what → how many since this process began."""
    with _lock:
        return {
            name: {what: _counts[name, what] for what in kinds} for name, kinds in WHAT.items()
        }


def count(name: str, what: str) -> None:
    """One more."""
    with _lock:
        _counts[name, what] += 1
    api = sys.modules.get("opentelemetry.metrics")
    if api is None:
        return
    if name not in _instruments:
        _instruments[name] = api.get_meter("libdsec").create_counter(f"dsec.client.{name}")
    _instruments[name].add(1, {"what": what})
