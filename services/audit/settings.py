"""What audit is configured with."""

from __future__ import annotations

from shared.settings import Common


class Settings(Common, kw_only=True):
    """``pg_dsn``: its own role's. ``rows_per_transaction`` bounds one insertion. Of the
    trajectory log what is older than ``trajectory_keep_s`` goes, and the oldest where it is
    more than ``trajectory_max_bytes``; it is looked at every ``trajectory_look_s``."""

    pg_dsn: str
    rows_per_transaction: int = 2_000
    trajectory_keep_s: float = 7 * 86_400.0
    trajectory_max_bytes: int = 16 << 30
    trajectory_look_s: float = 300.0
