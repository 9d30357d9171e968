"""The first tables."""

from __future__ import annotations

from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

DDL = """
create table project (
    id text primary key,
    name text not null,
    parent text references project,
    path text[] not null,
    created_at timestamptz not null default now()
);
create unique index project_one_root on project ((true)) where parent is null;
create index project_path on project using gin (path);

create table principal (
    id text primary key,
    kind text not null,
    name text not null,
    project text not null references project,
    node text,
    created_at timestamptz not null default now()
);
create index principal_project on principal (project);

create table api_key (
    id text primary key,
    principal text not null references principal on delete cascade,
    hash bytea not null,
    created_at timestamptz not null default now(),
    expires_at double precision,
    revoked_at double precision
);
create index api_key_principal on api_key (principal);

create table access_grant (
    principal text not null references principal on delete cascade,
    project text not null references project on delete cascade,
    verb text not null,
    source text not null default 'given',
    primary key (principal, project, verb, source)
);
create index access_grant_project on access_grant (project);

create table quota (
    project text primary key references project on delete cascade,
    sandboxes bigint,
    millicores bigint,
    memory_mb bigint,
    creations_per_s double precision
);

create table usage (
    project text primary key references project on delete cascade,
    sandboxes bigint not null default 0,
    millicores bigint not null default 0,
    memory_mb bigint not null default 0,
    tokens double precision,
    tokens_at double precision,
    check (sandboxes >= 0 and millicores >= 0 and memory_mb >= 0)
) with (fillfactor = 50);

create table charge (
    uid text primary key,
    project text not null,
    request text not null,
    millicores bigint not null,
    memory_mb bigint not null,
    at timestamptz not null default now()
);

create table request (
    id text primary key,
    project text not null,
    principal text not null,
    verb text not null,
    sha256 bytea not null,
    reply bytea,
    at timestamptz not null default now()
);
create index request_at on request (at);

create table inbox (
    consumer text not null,
    stream_seq bigint not null,
    at timestamptz not null default now(),
    primary key (consumer, stream_seq)
);

create table outbox (
    id bigint generated always as identity primary key,
    subject text not null,
    data bytea not null,
    headers text,
    at timestamptz not null default now()
);
"""


def upgrade() -> None:
    for statement in DDL.split(";"):
        if statement.strip():
            op.execute(statement)
