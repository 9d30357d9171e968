"""What of layers is read."""

from __future__ import annotations

from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

DDL = """
create table layer_access (
    digest text primary key references layer (digest) on delete cascade,
    unit_bytes bigint not null,
    units bigint[] not null,
    seen_at timestamptz not null default now()
)
"""


def upgrade() -> None:
    op.execute(DDL)
