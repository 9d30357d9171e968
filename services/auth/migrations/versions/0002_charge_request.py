"""What is charged for a request is found by an index: such a request is not forgotten."""

from __future__ import annotations

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Creates it."""
    op.execute("create index charge_request on charge (request)")


def downgrade() -> None:
    """Drops it."""
    op.execute("drop index charge_request")
