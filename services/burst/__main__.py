"""``python -m services.burst``."""

from __future__ import annotations

from functools import partial

from services.burst import app
from services.burst.settings import Settings
from shared import process


def main() -> None:
    """Serves until it is told to end."""
    loaded = process.configured("burst", Settings)
    process.run("burst", loaded, partial(app.main, loaded))


if __name__ == "__main__":
    main()
