"""audit's tables: the append-only record and the head of its chain."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Column,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    String,
    Table,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB

metadata = MetaData()

record = Table(
    "record",
    metadata,
    Column("seq", BigInteger, primary_key=True, autoincrement=False),
    Column("kind", String, nullable=False),
    Column("record_id", String, nullable=False),
    Column("at", Float(53), nullable=False),
    Column("project", String, nullable=False),
    Column("principal", String, nullable=False),
    Column("verb", String, nullable=False),
    Column("target", String, nullable=False),
    Column("outcome", String, nullable=False),
    Column("request_id", String, nullable=False),
    Column("record", JSONB, nullable=False),
    Column("prev", LargeBinary, nullable=False),
    Column("hash", LargeBinary, nullable=False),
    Index("record_once", "kind", "record_id", unique=True),
    Index("record_project", "project", "seq"),
    Index("record_target", "target", "seq", postgresql_where=text("target <> ''")),
    Index("record_request", "request_id", postgresql_where=text("request_id <> ''")),
)
"""The service's role may insert and select here, nothing else."""

head = Table(
    "head",
    metadata,
    Column("id", SmallInteger, primary_key=True, autoincrement=False),
    Column("seq", BigInteger, nullable=False),
    Column("hash", LargeBinary, nullable=False),
)
"""One row. Whoever appends locks it: that orders the chain among instances, and
tells ``verify`` how long the record must be."""

trajectory = Table(
    "trajectory",
    metadata,
    Column("node", String, primary_key=True),
    Column("uid", String, primary_key=True),
    Column("seq", BigInteger, primary_key=True, autoincrement=False),
    Column("project", String, nullable=False),
    Column("op_id", String, nullable=False),
    Column("verb", String, nullable=False),
    Column("principal", String, nullable=False),
    Column("at", Float(53), nullable=False),
    Column("lane", String),
    Column("step", BigInteger),
    Column("cut", BigInteger, nullable=False),
    Column("ended_at", Float(53)),
    Column("hour", Integer, nullable=False),
    Column("request", LargeBinary, nullable=False),
    Column("reply", LargeBinary, nullable=False),
    Index("trajectory_by_hour", "hour"),
)
"""What edges told of the operations in their sandboxes. ``hour``: of its arrival, since
the epoch."""

trajectory_hour = Table(
    "trajectory_hour",
    metadata,
    Column("hour", Integer, primary_key=True, autoincrement=False),
    Column("bytes", BigInteger, nullable=False),
)
"""How much arrived in each hour that is kept."""
