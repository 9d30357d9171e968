"""When an operation began, exactly: so that repetitions keep the order of short ones.

Revision ID: 0005
Revises: 0004
"""

from __future__ import annotations

from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.execute("alter table trajectory add column begun_at double precision")


def downgrade() -> None:
    op.execute("alter table trajectory drop column begun_at")
