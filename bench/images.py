"""The base image of the benchmarks: the demonstration's, built once and cached."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from demo.baseimage import base_image

BASE = "bench-base:1"


def rootfs() -> Path:
    """The base root file system as a directory."""
    return base_image(say=print)


async def ensure_base(client: Any) -> None:
    """Registers ``BASE`` where it is not known yet."""
    known = [image.name for image in await client.images.list()]
    if BASE not in known:
        await client.images.create(BASE, path=str(rootfs()))
