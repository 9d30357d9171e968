"""``python -m services.imagesvc``."""

from __future__ import annotations

from services.imagesvc.app import main
from services.imagesvc.settings import Settings
from shared import process, settings

if __name__ == "__main__":
    loaded = settings.load(Settings)
    process.run("imagesvc", loaded, lambda stop: main(loaded, stop))
