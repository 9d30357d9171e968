"""Creates that wait for room, and what is past its use, are found by indexes."""

from __future__ import annotations

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Creates them."""
    op.execute(
        "create index sandbox_queue on sandbox (project, created_at) "
        "where state = 'requested' and cause = 'capacity'"
    )
    op.execute(
        "create index sandbox_ended on sandbox (changed_at) "
        "where state in ('stopped', 'failed', 'rejected', 'lost')"
    )
    op.execute("create index request_at on request (at)")
    op.execute("create index sandbox_op on sandbox (op_id) where op_id is not null")


def downgrade() -> None:
    """Drops them."""
    for index in ("sandbox_op", "request_at", "sandbox_ended", "sandbox_queue"):
        op.execute(f"drop index {index}")
