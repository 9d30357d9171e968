"""Driver ``fake``: a deterministic backend without processes, on which the whole
system runs. Owns its sandboxes' files in memory and a folder that survives the edge."""

from __future__ import annotations

from services.edge.drivers.fake.driver import FakeDriver, create

__all__ = ["FakeDriver", "create"]
