"""What lies below the layers of every root: the places that a start mounts on.

Owns: making them, for each node once. Does not own: mounting there (guest/attach), which
makes what neither the image nor the ground has. An image that has no ``/etc/hosts`` would get
one in each sandbox's writable layer, with a copy of ``/etc``: that costs a start more than all
its mounts, and comes along in every capture.
"""

from __future__ import annotations

from pathlib import Path

FOLDERS = ("proc", "dev", "sys", "etc", "run")
FILES = ("etc/hosts", "etc/hostname", "etc/resolv.conf")
DECOY = "run/dsec"


def ground_of(folder: Path, *, decoy: bool) -> Path:
    """The lowest layer of a root, with a place for a decoy or without one."""
    return folder / ("decoy" if decoy else "plain")


def lay(folder: Path) -> None:
    """Makes both. Blocking; again is fine."""
    for decoy in (False, True):
        ground = ground_of(folder, decoy=decoy)
        for name in ("", *FOLDERS, *([DECOY] if decoy else [])):
            (ground / name).mkdir(parents=True, exist_ok=True)
            (ground / name).chmod(0o755)
        for name in FILES:
            (ground / name).touch()
            (ground / name).chmod(0o644)
