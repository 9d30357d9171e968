"""``python -m services.scheduler``."""

from __future__ import annotations

from services.scheduler.app import main
from services.scheduler.settings import Settings
from shared import process, settings

if __name__ == "__main__":
    loaded = settings.load(Settings)
    process.run("scheduler", loaded, lambda stop: main(loaded, stop))
