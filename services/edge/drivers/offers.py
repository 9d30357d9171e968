"""Which optional protocols a driver offers, found out once a class: to look for a
protocol's methods takes 80 µs, too long to be done for every command."""

from __future__ import annotations

from typing import TypeVar, cast

from services.edge.drivers.base import Driver

P = TypeVar("P")
_known: dict[tuple[type, type], bool] = {}


def offered(driver: Driver, port: type[P]) -> P | None:
    """The driver, where it offers ``port``."""
    key = (type(driver), port)
    if key not in _known:
        _known[key] = isinstance(driver, port)
    return cast("P", driver) if _known[key] else None
