"""Jobs: leases, and stops that creates may not overtake."""

from __future__ import annotations

from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

STATEMENTS = (
    "alter table request add column asked_at timestamptz not null default now()",
    """
    create table job (
        project text not null,
        id text collate "C" not null,
        state text not null check (state in ('free', 'leased', 'lapsed')),
        epoch bigint not null,
        holder text not null,
        principal text not null,
        lease_s double precision not null,
        lease_until timestamptz,
        on_lost text not null check (on_lost in ('pause', 'stop', 'keep')),
        lapsed_at timestamptz,
        stopped_at timestamptz,
        changed_at timestamptz not null default now(),
        primary key (project, id)
    ) with (fillfactor = 50)
    """,
    "create index job_lease on job (lease_until) where state = 'leased'",
    "create index job_lapsed on job (lapsed_at) where state = 'lapsed'",
)


def upgrade() -> None:
    """Adds the table and when a request was asked."""
    for statement in STATEMENTS:
        op.execute(statement)


def downgrade() -> None:
    """Drops them."""
    op.execute("drop table job")
    op.execute("alter table request drop column asked_at")
