"""The tables of auth, which alone writes them.

Amounts of cores are whole thousandths: sums that go up and down a million times must
come back to zero, which floating point does not promise.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    DateTime,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    func,
    text,
)  # fmt: skip
from sqlalchemy.dialects.postgresql import ARRAY

from shared.inbox import inbox_table
from shared.outbox import outbox_table

metadata = MetaData()


def _at(name: str = "created_at") -> Column[object]:
    return Column(name, DateTime(timezone=True), nullable=False, server_default=func.now())


project = Table(
    "project",
    metadata,
    Column("id", Text, primary_key=True),
    Column("name", Text, nullable=False),
    Column("parent", Text, ForeignKey("project.id")),
    Column("path", ARRAY(Text), nullable=False),
    _at(),
    Index("project_one_root", text("(true)"), unique=True, postgresql_where=text("parent is null")),
    Index("project_path", "path", postgresql_using="gin"),
)

principal = Table(
    "principal",
    metadata,
    Column("id", Text, primary_key=True),
    Column("kind", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("project", Text, ForeignKey("project.id"), nullable=False),
    Column("node", Text),
    _at(),
    Index("principal_project", "project"),
)

api_key = Table(
    "api_key",
    metadata,
    Column("id", Text, primary_key=True),
    Column("principal", Text, ForeignKey("principal.id", ondelete="cascade"), nullable=False),
    Column("hash", LargeBinary, nullable=False),
    _at(),
    Column("expires_at", Double),
    Column("revoked_at", Double),
    Index("api_key_principal", "principal"),
)

access_grant = Table(
    "access_grant",
    metadata,
    Column("principal", Text, ForeignKey("principal.id", ondelete="cascade"), primary_key=True),
    Column("project", Text, ForeignKey("project.id", ondelete="cascade"), primary_key=True),
    Column("verb", Text, primary_key=True),
    Column("source", Text, primary_key=True, server_default="given"),
    Index("access_grant_project", "project"),
)
"""``source`` is ``given``, or ``oidc`` for what a token's claim says."""

quota = Table(
    "quota",
    metadata,
    Column("project", Text, ForeignKey("project.id", ondelete="cascade"), primary_key=True),
    Column("sandboxes", BigInteger),
    Column("millicores", BigInteger),
    Column("memory_mb", BigInteger),
    Column("creations_per_s", Double),
)

usage = Table(
    "usage",
    metadata,
    Column("project", Text, ForeignKey("project.id", ondelete="cascade"), primary_key=True),
    Column("sandboxes", BigInteger, nullable=False, server_default="0"),
    Column("millicores", BigInteger, nullable=False, server_default="0"),
    Column("memory_mb", BigInteger, nullable=False, server_default="0"),
    Column("tokens", Double),
    Column("tokens_at", Double),
    CheckConstraint("sandboxes >= 0 and millicores >= 0 and memory_mb >= 0"),
)
"""What a project and everything below it use; ``tokens`` is the creation rate's bucket.
Every change locks the rows of the chains involved, in the order of their ids."""

charge = Table(
    "charge",
    metadata,
    Column("uid", Text, primary_key=True),
    Column("project", Text, nullable=False),
    Column("request", Text, nullable=False),
    Column("millicores", BigInteger, nullable=False),
    Column("memory_mb", BigInteger, nullable=False),
    _at("at"),
    Index("charge_request", "request"),
)

request = Table(
    "request",
    metadata,
    Column("id", Text, primary_key=True),
    Column("project", Text, nullable=False),
    Column("principal", Text, nullable=False),
    Column("verb", Text, nullable=False),
    Column("sha256", LargeBinary, nullable=False),
    Column("reply", LargeBinary),
    _at("at"),
    Index("request_at", "at"),
)
"""``reply``: for creates which items the quota refused, for iam requests the answer
(without a secret)."""

secret = Table(
    "secret",
    metadata,
    Column("project", Text, ForeignKey("project.id", ondelete="cascade"), primary_key=True),
    Column("name", Text, primary_key=True),
    Column("version", Integer, nullable=False),
    Column("hosts", ARRAY(Text), nullable=False),
    Column("plain", Boolean, nullable=False),
    Column("sealed", LargeBinary, nullable=False),
    Column("changed_at", DateTime(timezone=True), nullable=False),
    Column("changed_by", Text, nullable=False),
)
"""``sealed``: the value, encrypted (:mod:`services.auth.sealing`)."""

policy = Table(
    "policy",
    metadata,
    Column("project", Text, ForeignKey("project.id", ondelete="cascade"), primary_key=True),
    Column("name", Text, primary_key=True),
    Column("version", Integer, primary_key=True),
    Column("document", Text, nullable=False),
    Column("created_at", DateTime(timezone=True), nullable=False),
    Column("created_by", Text, nullable=False),
)

inbox = inbox_table(metadata)
outbox = outbox_table(metadata)
