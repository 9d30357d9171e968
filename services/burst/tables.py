"""burst's tables: plans, leases and the outbox."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    DateTime,
    Float,
    Identity,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    func,
)
from sqlalchemy.dialects.postgresql import JSONB

from shared.outbox import outbox_table

metadata = MetaData()

plan = Table(
    "plan",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("at", DateTime(timezone=True), nullable=False, server_default=func.now()),
    Column("bursting", Boolean, nullable=False),
    Column("utilisation", Float(53), nullable=False),
    Column("share", Float(53), nullable=False),
    Column("lease", Integer, nullable=False),
    Column("release", Integer, nullable=False),
    Column("reason", String, nullable=False),
    Column("pools", JSONB, nullable=False),
    Index("plan_at", "at"),
)
lease = Table(
    "lease",
    metadata,
    Column("lease_id", String, primary_key=True),
    Column("provider", String, nullable=False),
    Column("state", String, nullable=False),
    Column("node", String),
    Column("reason", String, nullable=False, server_default=""),
    Column("at", DateTime(timezone=True), nullable=False, server_default=func.now()),
    Index("lease_state", "state"),
)
"""``state``: requested, joined, releasing, released, failed."""
outbox = outbox_table(metadata)
