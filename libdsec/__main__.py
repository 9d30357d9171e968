"""``python -m libdsec``: the command line."""

from __future__ import annotations

from libdsec.cli import main

if __name__ == "__main__":
    main()
