"""The append-only record and the head of its chain.

Revision ID: 0001
Revises:
"""

from __future__ import annotations

from alembic import op

revision = "0001"
down_revision = None

UP = (
    """
    create table record (
        seq bigint primary key,
        kind varchar not null,
        record_id varchar not null,
        at double precision not null,
        project varchar not null,
        principal varchar not null,
        verb varchar not null,
        target varchar not null,
        outcome varchar not null,
        request_id varchar not null,
        record jsonb not null,
        prev bytea not null,
        hash bytea not null
    )
    """,
    "create unique index record_once on record (kind, record_id)",
    "create index record_project on record (project, seq)",
    "create index record_target on record (target, seq) where target <> ''",
    "create index record_request on record (request_id) where request_id <> ''",
    "create table head (id smallint primary key, seq bigint not null, hash bytea not null)",
    r"insert into head values (1, 0, decode(repeat('00', 32), 'hex'))",
    # tables belong to the administrator: the service's own role can only add
    "revoke all on record, head from dsec_audit",
    "grant select, insert on record to dsec_audit",
    "grant select, update on head to dsec_audit",
)


def upgrade() -> None:
    for statement in UP:
        op.execute(statement)


def downgrade() -> None:
    op.execute("drop table head, record")
