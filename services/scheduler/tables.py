"""Tables of the scheduler's schema, as metadata: the migrations' counterpart.

Owns: names and types. Does not own: queries (``store``, ``nodes``). Only this
service writes them.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    DateTime,
    Float,
    Identity,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    text,
)  # fmt: skip
from sqlalchemy.dialects.postgresql import ARRAY, JSONB

from shared.outbox import outbox_table

metadata = MetaData()

request = Table(
    "request",
    metadata,
    Column("request_id", Text, primary_key=True),
    Column("project", Text, nullable=False),
    Column("principal", Text, nullable=False),
    Column("reply_to", Text),
    Column("total", Integer, nullable=False),
    Column("trace", Text),
    Column("projects", JSONB, nullable=False, server_default=text("'[]'")),
    Column("asked_at", DateTime(timezone=True), nullable=False, server_default=text("now()")),
    Column("at", DateTime(timezone=True), nullable=False, server_default=text("now()")),
)
"""One client request: what its sandboxes share."""

spec = Table(
    "spec",
    metadata,
    Column("request_id", Text, primary_key=True),
    Column("idx", Integer, primary_key=True),
    Column("resolved", Boolean, nullable=False),
    Column("body", LargeBinary, nullable=False),
)
"""A spec once per request, however many sandboxes it has: ``ResolvedSpec`` as JSON."""

sandbox = Table(
    "sandbox",
    metadata,
    Column("uid", Text, primary_key=True),
    Column("project", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("generation", BigInteger, nullable=False),
    Column("placed_generation", BigInteger, nullable=False),
    Column("node", Text),
    Column("request_id", Text),
    Column("index", Integer, nullable=False),
    Column("spec_idx", Integer, nullable=False),
    Column("principal", Text, nullable=False),
    Column("backend", Text, nullable=False),
    Column("cores", Float, nullable=False),
    Column("memory_mb", BigInteger, nullable=False),
    Column("job", Text),
    Column("labels", JSONB, nullable=False),
    Column("cause", Text),
    Column("is_infra", Boolean, nullable=False),
    Column("message", Text, nullable=False),
    Column("error", JSONB),
    Column("enforcement", JSONB),
    Column("tried_nodes", Text, nullable=False),
    Column("op_id", Text),
    Column("expires_at", DateTime(timezone=True), nullable=False),
    Column("deadline_at", DateTime(timezone=True)),
    Column("created_at", DateTime(timezone=True), nullable=False),
    Column("running_at", DateTime(timezone=True)),
    Column("changed_at", DateTime(timezone=True), nullable=False),
)
"""A row without ``request_id`` is a stop that came before its create."""

transition = Table(
    "transition",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("uid", Text, nullable=False),
    Column("generation", BigInteger, nullable=False),
    Column("source", Text, nullable=False),
    Column("target", Text, nullable=False),
    Column("event", Text, nullable=False),
    Column("by", Text, nullable=False),
    Column("cause", Text),
    Column("at", DateTime(timezone=True), nullable=False),
)
"""Append only."""

op = Table(
    "op",
    metadata,
    Column("request_id", Text, primary_key=True),
    Column("reply_to", Text),
    Column("uids", ARRAY(Text), nullable=False),
    Column("settled", LargeBinary, nullable=False),
    Column("remaining", Integer, nullable=False),
    Column("at", DateTime(timezone=True), nullable=False, server_default=text("now()")),
)
"""An operation that waits for ``remaining`` sandboxes; ``settled`` holds the results
that were known at once (errors) as a JSON list."""

job = Table(
    "job",
    metadata,
    Column("project", Text, primary_key=True),
    Column("id", Text, primary_key=True),
    Column("state", Text, nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("holder", Text, nullable=False),
    Column("principal", Text, nullable=False),
    Column("lease_s", Float, nullable=False),
    Column("lease_until", DateTime(timezone=True)),
    Column("on_lost", Text, nullable=False),
    Column("lapsed_at", DateTime(timezone=True)),
    Column("stopped_at", DateTime(timezone=True)),
    Column("changed_at", DateTime(timezone=True), nullable=False, server_default=text("now()")),
)
"""``stopped_at``: when the bus stored the last stop of the whole job. Creates lock the
row for share, a stop for update: whichever came later sees the other."""

node = Table(
    "node",
    metadata,
    Column("id", Text, primary_key=True),
    Column("admin", Text, nullable=False),
    Column("pool", Text, nullable=False),
    Column("epoch", Text, nullable=False),
    Column("admitting", Boolean, nullable=False),
    Column("backends", JSONB, nullable=False),
    Column("capacity_cores", Float, nullable=False),
    Column("capacity_memory_mb", BigInteger, nullable=False),
    Column("capacity_sandboxes", BigInteger, nullable=False),
    Column("committed_cores", Float, nullable=False),
    Column("committed_memory_mb", BigInteger, nullable=False),
    Column("committed_sandboxes", BigInteger, nullable=False),
    Column("seen_at", DateTime(timezone=True), nullable=False),
    Column("lost_at", DateTime(timezone=True)),
)
"""``admin``: ready, cordoned or draining, what the operator wants; ``lost_at``: what
the watcher found. ``committed_*`` move only with the sandboxes they are for."""

outbox = outbox_table(metadata)
