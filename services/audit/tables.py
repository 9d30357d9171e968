"""audit's tables: the append-only record by days, the head of its chain, what is left of
days that are gone, and what judging needs."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Column,
    Date,
    DateTime,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    String,
    Table,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import JSON

from shared.outbox import outbox_table

metadata = MetaData()

record = Table(
    "record",
    metadata,
    Column("seq", BigInteger, primary_key=True, autoincrement=False),
    Column("day", Date, primary_key=True),
    Column("kind", String, nullable=False),
    Column("record_id", String, nullable=False),
    Column("at", Float(53), nullable=False),
    Column("project", String, nullable=False),
    Column("principal", String, nullable=False),
    Column("verb", String, nullable=False),
    Column("target", String, nullable=False),
    Column("outcome", String, nullable=False),
    Column("request_id", String, nullable=False),
    Column("record", JSON, nullable=False),
    Column("prev", LargeBinary, nullable=False),
    Column("hash", LargeBinary, nullable=False),
    Index("record_once", "kind", "record_id", "day", unique=True),
    Index("record_project", "project", "seq"),
    Index("record_target", "target", "seq", postgresql_where=text("target <> ''")),
    Index("record_request", "request_id", postgresql_where=text("request_id <> ''")),
    postgresql_partition_by="range (day)",
)
"""A partition a day, the day of recording. The service's role may insert and select
here, nothing else."""

head = Table(
    "head",
    metadata,
    Column("id", SmallInteger, primary_key=True, autoincrement=False),
    Column("seq", BigInteger, nullable=False),
    Column("hash", LargeBinary, nullable=False),
    Column("day", Date, nullable=False),
)
"""One row. Whoever appends locks it: that orders the chain among instances, and
tells ``verify`` how long the record must be."""

retention = Table(
    "retention",
    metadata,
    Column("id", SmallInteger, primary_key=True, autoincrement=False),
    Column("keep_days", Integer, nullable=False),
)
"""One row, the administrator's: for how many days the record is kept."""

anchor = Table(
    "anchor",
    metadata,
    Column("seq", BigInteger, primary_key=True, autoincrement=False),
    Column("hash", LargeBinary, nullable=False),
    Column("day", Date, nullable=False),
    Column("entries", BigInteger, nullable=False),
    Column("at", DateTime(timezone=True), nullable=False, server_default=func.now()),
)
"""The last entry of each day that is gone: what the rest of the chain begins behind."""

owner = Table(
    "owner",
    metadata,
    Column("uid", String, primary_key=True),
    Column("node", String, nullable=False),
    Column("project", String, nullable=False),
    Column("principal", String, nullable=False),
    Column("job", String, nullable=False),
    Column("task", String, nullable=False),
    Column("at", DateTime(timezone=True), nullable=False, server_default=func.now()),
    Index("owner_at", "at"),
)
"""Whose a sandbox is."""

measured = Table(
    "measured",
    metadata,
    Column("rule", String, primary_key=True),
    Column("key", String, primary_key=True),
    Column("state", LargeBinary, nullable=False),
    Column("at", DateTime(timezone=True), nullable=False, server_default=func.now()),
    Index("measured_at", "at"),
)
"""What rules have measured of sandboxes and nodes in their windows."""

outbox = outbox_table(metadata)
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
    Column("begun_at", Float(53)),
    Index("trajectory_by_hour", "hour"),
)
"""What edges told of the operations in their sandboxes. ``hour``: of its arrival, since
the epoch."""

trajectory_output = Table(
    "trajectory_output",
    metadata,
    Column("node", String, primary_key=True),
    Column("uid", String, primary_key=True),
    Column("seq", BigInteger, primary_key=True, autoincrement=False),
    Column("stream", String, primary_key=True),
    Column("piece", Integer, primary_key=True, autoincrement=False),
    Column("project", String, nullable=False),
    Column("hour", Integer, nullable=False),
    Column("data", LargeBinary, nullable=False),
    Index("trajectory_output_by_hour", "hour"),
)
"""Whole outputs of which rows of ``trajectory`` hold head and tail, in pieces."""

trajectory_hour = Table(
    "trajectory_hour",
    metadata,
    Column("hour", Integer, primary_key=True, autoincrement=False),
    Column("bytes", BigInteger, nullable=False),
)
"""How much arrived in each hour that is kept."""
