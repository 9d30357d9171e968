"""The scheduler's first schema."""

from __future__ import annotations

from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

STATEMENTS = (
    """
    create table request (
        request_id text primary key,
        project text not null,
        principal text not null,
        reply_to text,
        total integer not null,
        trace text,
        projects jsonb not null default '[]',
        at timestamptz not null default now()
    )
    """,
    """
    create table spec (
        request_id text not null,
        idx integer not null,
        resolved boolean not null,
        body bytea not null,
        primary key (request_id, idx)
    )
    """,
    """
    create table sandbox (
        uid text collate "C" primary key,
        project text not null,
        state text not null,
        generation bigint not null,
        placed_generation bigint not null,
        node text,
        request_id text,
        index integer not null,
        spec_idx integer not null,
        principal text not null,
        backend text not null,
        cores double precision not null,
        memory_mb bigint not null,
        job text,
        labels jsonb not null,
        cause text,
        is_infra boolean not null,
        message text not null,
        error jsonb,
        enforcement jsonb,
        tried_nodes text not null,
        op_id text,
        expires_at timestamptz not null,
        deadline_at timestamptz,
        created_at timestamptz not null,
        running_at timestamptz,
        changed_at timestamptz not null,
        constraint known_state check (state in (
            'requested', 'placed', 'starting', 'running', 'pausing', 'paused', 'resuming',
            'stopping', 'stopped', 'failed', 'rejected', 'lost')),
        constraint on_node check (node is not null or state not in (
            'placed', 'starting', 'running', 'pausing', 'paused', 'resuming', 'stopping'))
    ) with (fillfactor = 80)
    """,
    "create index sandbox_project on sandbox (project, uid)",
    "create index sandbox_request on sandbox (request_id) where request_id is not null",
    "create index sandbox_job on sandbox (project, job) where job is not null",
    "create index sandbox_labels on sandbox using gin (labels jsonb_path_ops) where labels <> '{}'",
    "create index sandbox_node on sandbox (node) where state in "
    "('placed', 'starting', 'running', 'pausing', 'paused', 'resuming', 'stopping')",
    "create index sandbox_deadline on sandbox (deadline_at) where deadline_at is not null",
    """
    create table transition (
        id bigint generated always as identity primary key,
        uid text collate "C" not null,
        generation bigint not null,
        source text not null,
        target text not null,
        event text not null,
        by text not null,
        cause text,
        at timestamptz not null
    )
    """,
    "create index transition_uid on transition (uid)",
    """
    create table op (
        request_id text primary key,
        reply_to text,
        uids text[] not null,
        settled bytea not null,
        remaining integer not null,
        at timestamptz not null default now()
    )
    """,
    """
    create table node (
        id text primary key,
        admin text not null check (admin in ('ready', 'cordoned', 'draining')),
        pool text not null,
        epoch text not null,
        admitting boolean not null,
        backends jsonb not null,
        capacity_cores double precision not null,
        capacity_memory_mb bigint not null,
        capacity_sandboxes bigint not null,
        committed_cores double precision not null default 0,
        committed_memory_mb bigint not null default 0,
        committed_sandboxes bigint not null default 0,
        seen_at timestamptz not null default now(),
        lost_at timestamptz
    ) with (fillfactor = 50)
    """,
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
    """Creates every table."""
    for statement in STATEMENTS:
        op.execute(statement)


def downgrade() -> None:
    """Drops them."""
    for table in ("outbox", "node", "op", "transition", "sandbox", "spec", "request"):
        op.execute(f"drop table {table}")
