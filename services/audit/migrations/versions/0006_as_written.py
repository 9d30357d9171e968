"""Entries are kept as they were written, and ids compared byte by byte.

``json`` keeps the text that was hashed; taking it apart on the way in was a fourth of an
entry's cost to the server. Comparing by a locale's rules was another.

Revision ID: 0006
Revises: 0005
"""

from __future__ import annotations

from alembic import op

revision = "0006"
down_revision = "0005"

RECORD = ("kind", "record_id", "project", "target", "request_id")
TRAJECTORY = ("node", "uid")


def _alter(collation: str, as_: str) -> None:
    texts = ", ".join(f"alter {name} type varchar collate {collation}" for name in RECORD)
    op.execute(f"alter table record alter record type {as_} using record::text::{as_}, {texts}")
    texts = ", ".join(f"alter {name} type varchar collate {collation}" for name in TRAJECTORY)
    op.execute(f"alter table trajectory {texts}")


def upgrade() -> None:
    _alter('"C"', "json")


def downgrade() -> None:
    _alter('"default"', "jsonb")
