"""A sandbox's folder as the driver keeps it: which container it has.

Owns: ``meta.json``, written before the container becomes the sandbox's own. Does not
own: the writable layer beside it, or what happens to a container.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

META = "meta.json"
DISK = "disk"
"""The note of a limited disk."""


def note(folder: Path, data: Mapping[str, Any]) -> None:
    """Writes what the sandbox is made of."""
    (folder / META).write_bytes(msgspec.json.encode(data))


def noted(sandboxes_dir: Path) -> dict[str, dict[str, Any]]:
    """What is known of every sandbox's folder, by uid; empty where a crash came first."""
    return {folder.name: _read(folder) for folder in sandboxes_dir.iterdir()}


def disk_of(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """The note of the sandbox's disk; empty without a limit."""
    note: Mapping[str, Any] = data.get(DISK, {})
    return note


def _read(folder: Path) -> dict[str, Any]:
    try:
        found = msgspec.json.decode((folder / META).read_bytes())
    except (OSError, msgspec.DecodeError):
        return {}
    return found if isinstance(found, dict) else {}
