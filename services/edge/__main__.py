"""``python -m services.edge``, and ``… clear``: what a dead edge left is ended."""

from __future__ import annotations

import asyncio
import sys
from functools import partial

from services.edge.app import main
from services.edge.clear import clear
from services.edge.settings import Settings
from shared.process import run
from shared.settings import load

if __name__ == "__main__":
    settings = load(Settings)
    if sys.argv[1:] == ["clear"]:
        asyncio.run(clear(settings))
    else:
        run("edge", settings, partial(main, settings))
