"""Rows of the outbox that the bus refuses are given up in the end."""

from __future__ import annotations

from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Adds how often a row was refused, and when it is tried again."""
    op.execute(
        "alter table outbox add column tries integer not null default 0, "
        "add column next_at timestamptz not null default now()"
    )


def downgrade() -> None:
    """Takes both away."""
    op.execute("alter table outbox drop column tries, drop column next_at")
