"""Named policies of projects, by version."""

from __future__ import annotations

from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Adds their table."""
    op.execute(
        "create table policy ("
        "project text not null references project (id) on delete cascade, "
        "name text not null, version integer not null, document text not null, "
        "created_at timestamptz not null, created_by text not null, "
        "primary key (project, name, version))"
    )


def downgrade() -> None:
    """Takes it away."""
    op.execute("drop table policy")
