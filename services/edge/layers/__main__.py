"""``python -m services.edge.layers``: the layer service of a node."""

from __future__ import annotations

from services.edge.layers import keeper
from services.edge.layers.settings import Settings
from shared import process

if __name__ == "__main__":
    keeper.main(process.configured("layers", Settings))
