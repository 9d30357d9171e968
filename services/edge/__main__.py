"""``python -m services.edge``"""

from __future__ import annotations

from functools import partial

from services.edge.app import main
from services.edge.settings import Settings
from shared.process import run
from shared.settings import load

if __name__ == "__main__":
    settings = load(Settings)
    run("edge", settings, partial(main, settings))
