"""The first tables."""

from __future__ import annotations

from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

DDL = """
create table layer (
    digest text primary key,
    size_bytes bigint not null,
    entries bigint not null,
    created_at timestamptz not null default now()
);

create table image (
    project text not null,
    name text not null,
    tag text not null,
    kind text not null,
    config jsonb not null,
    size_bytes bigint not null,
    principal text not null,
    created_at timestamptz not null default now(),
    primary key (project, name, tag)
);

create table image_layer (
    project text not null,
    name text not null,
    tag text not null,
    position integer not null,
    digest text not null references layer (digest),
    primary key (project, name, tag, position),
    foreign key (project, name, tag) references image (project, name, tag) on delete cascade
);
create index image_layer_digest on image_layer (digest);

create table request (
    project text not null,
    id text not null,
    sha256 bytea not null,
    reply bytea not null,
    at timestamptz not null default now(),
    primary key (project, id)
);
create index request_at on request (at);
"""


def upgrade() -> None:
    for statement in DDL.split(";"):
        if statement.strip():
            op.execute(statement)
