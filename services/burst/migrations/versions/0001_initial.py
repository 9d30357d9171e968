"""Plans, leases, outbox.

Revision ID: 0001
Revises:
"""

from __future__ import annotations

from alembic import op

revision = "0001"
down_revision = None

UP = (
    """
    create table plan (
        id bigint generated always as identity primary key,
        at timestamptz not null default now(),
        bursting boolean not null,
        utilisation double precision not null,
        share double precision not null,
        lease integer not null,
        release integer not null,
        reason varchar not null,
        pools jsonb not null
    )
    """,
    "create index plan_at on plan (at)",
    """
    create table lease (
        lease_id varchar primary key,
        provider varchar not null,
        state varchar not null,
        node varchar,
        reason varchar not null default '',
        at timestamptz not null default now()
    )
    """,
    "create index lease_state on lease (state)",
    """
    create table outbox (
        id bigint generated always as identity primary key,
        subject varchar not null,
        data bytea not null,
        headers text,
        at timestamptz not null default now()
    )
    """,
)


def upgrade() -> None:
    for statement in UP:
        op.execute(statement)


def downgrade() -> None:
    op.execute("drop table plan, lease, outbox")
