"""What was done in sandboxes, as their edges told it.

Revision ID: 0002
Revises: 0001
"""

from __future__ import annotations

from alembic import op

revision = "0002"
down_revision = "0001"

UP = (
    """
    create table trajectory (
        node varchar not null,
        uid varchar not null,
        seq bigint not null,
        project varchar not null,
        op_id varchar not null,
        verb varchar not null,
        principal varchar not null,
        at double precision not null,
        lane varchar,
        step bigint,
        cut bigint not null,
        ended_at double precision,
        hour integer not null,
        request bytea not null,
        reply bytea not null,
        primary key (node, uid, seq)
    )
    """,
    "create index trajectory_by_hour on trajectory (hour)",
    "create table trajectory_hour (hour integer primary key, bytes bigint not null)",
)


def upgrade() -> None:
    for statement in UP:
        op.execute(statement)


def downgrade() -> None:
    op.execute("drop table trajectory, trajectory_hour")
