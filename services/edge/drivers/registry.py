"""Drivers by name. A driver is a module (or package) ``services.edge.drivers.<name>``
with a function ``create(config) -> Driver``; it is imported only where it is used."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from services.edge.drivers.base import Driver
from shared.errors import InvalidRequest

_NAME = re.compile(r"^[a-z][a-z0-9]{0,30}\Z")


@dataclass(frozen=True, slots=True)
class DriverConfig:
    """What a driver is given: its node, a folder of its own, and the process's
    environment variables ``DSEC_<DRIVER>_<OPTION>`` as ``options`` (lower case)."""

    node: str
    state_dir: Path
    options: Mapping[str, str] = field(default_factory=dict)


def create(name: str, config: DriverConfig) -> Driver:
    """The driver called ``name``. Raises ``InvalidRequest`` (field ``drivers``)."""
    module = f"services.edge.drivers.{name}"
    if not _NAME.match(name):
        raise InvalidRequest(f"{name!r} is not a driver's name", field="drivers")
    try:
        factory = importlib.import_module(module).create
    except ModuleNotFoundError as exc:
        if exc.name != module:
            raise  # the driver is there, something it needs is not
        raise InvalidRequest(f"there is no driver {name!r}", field="drivers") from exc
    except AttributeError as exc:
        raise InvalidRequest(f"{name!r} is not a driver", field="drivers") from exc
    return cast(Driver, factory(config))


def options(name: str, environment: Mapping[str, str]) -> dict[str, str]:
    """The options of one driver in ``environment``."""
    prefix = f"DSEC_{name.upper()}_"
    return {
        key.removeprefix(prefix).lower(): value
        for key, value in environment.items()
        if key.startswith(prefix)
    }
