"""What a worker container needs besides Python: the SDK and its two dependencies.

Owns: a toolkit layer of them, made from this checkout and this environment's own
packages. Does not own: the base image below it. Why not installed inside: a worker has no
network, and the demonstration needs no registry.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from importlib.metadata import distribution
from pathlib import Path

from libdsec import DSecClient

KIT = "dsec-worker-kit:1"
DISTRIBUTIONS = ("nats-py", "msgspec")
PREFIX = f"/usr/local/lib/python{sys.version_info.major}.{sys.version_info.minor}/dist-packages"
"""Where Debian's Python of the same version looks; one of its modules is compiled for it."""
ROOT = Path(__file__).resolve().parent.parent


def write_kit(tree: Path) -> None:
    """Writes the packages below ``tree``, which must not exist."""
    shutil.copytree(
        ROOT / "libdsec", tree / "libdsec", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name in DISTRIBUTIONS:
        for file in distribution(name).files or ():
            if ".." in file.parts or "__pycache__" in file.parts:
                continue  # its scripts are not for workers
            target = tree / Path(*file.parts)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(str(file.locate()), target)


async def register(client: DSecClient, folder: Path, *, base: str) -> Sequence[str]:
    """Imports the kit by way of ``folder``, from which the system imports; the layers of
    a worker over the image ``base``."""
    if KIT not in {image.name for image in await client.images.list()}:
        tree = folder / "worker-kit"
        write_kit(tree)
        await client.images.create(KIT, path=str(tree), kind="toolkit", prefix=PREFIX)
        shutil.rmtree(tree)
    return [base, KIT]
