"""Outputs that are too long for their records.

Revision ID: 0004
Revises: 0003
"""

from __future__ import annotations

from alembic import op

revision = "0004"
down_revision = "0003"

UP = (
    """
    create table trajectory_output (
        node varchar not null,
        uid varchar not null,
        seq bigint not null,
        stream varchar not null,
        piece integer not null,
        project varchar not null,
        hour integer not null,
        data bytea not null,
        primary key (node, uid, seq, stream, piece)
    )
    """,
    "alter table trajectory_output alter column data set storage external",
    "create index trajectory_output_by_hour on trajectory_output (hour)",
)


def upgrade() -> None:
    for statement in UP:
        op.execute(statement)


def downgrade() -> None:
    op.execute("drop table trajectory_output")
