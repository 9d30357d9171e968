"""Creates that wait for room are found by an index of their own."""

from __future__ import annotations

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Creates it."""
    op.execute(
        "create index sandbox_queue on sandbox (project, created_at) "
        "where state = 'requested' and cause = 'capacity'"
    )


def downgrade() -> None:
    """Drops it."""
    op.execute("drop index sandbox_queue")
