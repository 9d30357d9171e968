"""What lies below the layers of every root."""

from __future__ import annotations

import os
from pathlib import Path

from services.edge.drivers.base import Layer
from services.edge.drivers.container.ground import DECOY, lay
from services.edge.drivers.container.ground import ground_of as ground
from services.edge.drivers.container.shells import Root
from services.edge.layers.mounts import LAYERS_MAX, Upper


def test_it_has_the_places_to_mount_on_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        lay(tmp_path / "ground")
        lay(tmp_path / "ground")
    finally:
        os.umask(before)
    for decoy in (False, True):
        made = ground(tmp_path / "ground", decoy=decoy)
        modes = {
            str(path.relative_to(made)): (path.is_dir(), path.stat().st_mode & 0o7777)
            for path in made.rglob("*")
        }
        assert made.stat().st_mode & 0o7777 == 0o755
        assert modes.pop("etc/hosts") == (False, 0o644)
        assert modes.pop("etc/hostname") == modes.pop("etc/resolv.conf") == (False, 0o644)
        assert set(modes.values()) == {(True, 0o755)}
        assert (DECOY in modes) is decoy


def test_a_root_of_as_many_layers_as_can_be_does_without(tmp_path: Path) -> None:
    def root(layers: int, above: int) -> Root:
        layer = Layer(digest="d", meta="m", data=None)
        return Root([layer] * layers, Upper(tmp_path), [tmp_path] * above, tmp_path / "ground")

    assert root(1, 0).below == (tmp_path / "ground",) and root(1, 0).count == 2
    assert root(LAYERS_MAX - 2, 1).count == LAYERS_MAX
    assert root(LAYERS_MAX - 1, 1).below == () and root(LAYERS_MAX - 1, 1).count == LAYERS_MAX
