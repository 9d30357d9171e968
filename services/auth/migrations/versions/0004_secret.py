"""Secrets of projects, sealed."""

from __future__ import annotations

from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Adds their table."""
    op.execute(
        "create table secret ("
        "project text not null references project (id) on delete cascade, "
        "name text not null, version integer not null, hosts text[] not null, "
        "plain boolean not null, sealed bytea not null, changed_at timestamptz not null, "
        "changed_by text not null, primary key (project, name))"
    )


def downgrade() -> None:
    """Takes it away."""
    op.execute("drop table secret")
