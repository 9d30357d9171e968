"""What garbage collection goes by: when a layer was last wanted, and who is at it."""

from __future__ import annotations

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

DDL = """
alter table layer add column used_at timestamptz not null default now();
create index layer_used on layer (used_at);

create table lease (
    holder text not null,
    digest text not null references layer (digest),
    until timestamptz not null,
    primary key (holder, digest)
);
create index lease_digest on lease (digest);
"""


def upgrade() -> None:
    for statement in DDL.split(";"):
        if statement.strip():
            op.execute(statement)
