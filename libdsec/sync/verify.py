"""Verdicts for code without an event loop: :mod:`libdsec.verify`, with the same names."""

from __future__ import annotations

from libdsec._faces import MODULES
from libdsec._sync_face import make_module

__all__ = make_module(globals(), MODULES["verify"])
