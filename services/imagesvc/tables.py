"""The tables of imagesvc, which alone writes them.

A name points to layers by digest; several names share layers. Layers stay in the
store when a name goes, because running sandboxes may need them, until collection.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Column,
    DateTime,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    func,
)  # fmt: skip
from sqlalchemy.dialects.postgresql import ARRAY, JSONB

metadata = MetaData()


def _at(name: str = "created_at") -> Column[object]:
    return Column(name, DateTime(timezone=True), nullable=False, server_default=func.now())


layer = Table(
    "layer",
    metadata,
    Column("digest", Text, primary_key=True),
    Column("size_bytes", BigInteger, nullable=False),
    Column("entries", BigInteger, nullable=False),
    _at(),
    _at("used_at"),
    Index("layer_used", "used_at"),
)
"""``used_at``: when a name last let go of it, or an import last wanted it."""

lease = Table(
    "lease",
    metadata,
    Column("holder", Text, primary_key=True),
    Column("digest", Text, primary_key=True),
    Column("until", DateTime(timezone=True), nullable=False),
    ForeignKeyConstraint(["digest"], ["layer.digest"]),
    Index("lease_digest", "digest"),
)
"""``holder`` is the request of an import that stores the layer."""

layer_access = Table(
    "layer_access",
    metadata,
    Column("digest", Text, primary_key=True),
    Column("unit_bytes", BigInteger, nullable=False),
    Column("units", ARRAY(BigInteger), nullable=False),
    _at("seen_at"),
    ForeignKeyConstraint(["digest"], ["layer.digest"], ondelete="cascade"),
)
"""``units``: what readers on any node needed of the layer's data, sorted."""

image = Table(
    "image",
    metadata,
    Column("project", Text, primary_key=True),
    Column("name", Text, primary_key=True),
    Column("tag", Text, primary_key=True),
    Column("kind", Text, nullable=False),
    Column("config", JSONB, nullable=False),
    Column("size_bytes", BigInteger, nullable=False),
    Column("principal", Text, nullable=False),
    _at(),
    Column("provenance", JSONB),
)
"""``provenance``: of what was packed from a sandbox."""

image_layer = Table(
    "image_layer",
    metadata,
    Column("project", Text, primary_key=True),
    Column("name", Text, primary_key=True),
    Column("tag", Text, primary_key=True),
    Column("position", Integer, primary_key=True),
    Column("digest", Text, nullable=False),
    ForeignKeyConstraint(
        ["project", "name", "tag"], ["image.project", "image.name", "image.tag"],
        ondelete="cascade",
    ),
    ForeignKeyConstraint(["digest"], ["layer.digest"]),
    Index("image_layer_digest", "digest"),
)  # fmt: skip
"""``position`` 0 is the bottom."""

request = Table(
    "request",
    metadata,
    Column("project", Text, primary_key=True),
    Column("id", Text, primary_key=True),
    Column("sha256", LargeBinary, nullable=False),
    Column("reply", LargeBinary, nullable=False),
    _at("at"),
    Index("request_at", "at"),
)
"""The answer to each request that was carried out or refused, for its repetition."""
