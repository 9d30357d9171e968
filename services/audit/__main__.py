"""``python -m services.audit`` serves; ``python -m services.audit verify`` checks the chain."""

from __future__ import annotations

import sys
from functools import partial

from services.audit import app
from services.audit.settings import Settings
from shared import process


def main() -> None:
    """Serves, or verifies the record and exits with 1 where it is broken."""
    if sys.argv[1:] == ["verify"]:
        from services.audit.verify import run

        sys.exit(run(process.configured("audit", Settings)))
    if sys.argv[1:]:
        sys.exit("usage: python -m services.audit [verify]")
    loaded = process.configured("audit", Settings)
    process.run("audit", loaded, partial(app.main, loaded))


if __name__ == "__main__":
    main()
