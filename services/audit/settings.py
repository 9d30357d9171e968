"""What audit is configured with."""

from __future__ import annotations

from shared.settings import Common


class Settings(Common, kw_only=True):
    """``pg_dsn``: its own role's. ``rows_per_transaction`` bounds one insertion."""

    pg_dsn: str
    rows_per_transaction: int = 2_000
