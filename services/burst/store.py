"""All SQL of burst: plans and leases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from schemas.base import encode
from schemas.burst import BurstPlan
from services.burst.planner import Plan
from shared.db import Database
from shared.outbox import Outbox
from shared.stored import Outgoing

PLAN_LOCK = 0x62757273  # "burs": instances take turns at planning
PRUNE_ROWS = 100
"""Rows past their use that go with one new plan."""
_OLD_PLANS = text(
    "delete from plan where id in (select id from plan "
    "where at < now() - make_interval(secs => :keep) order by at limit :n)"
)
_OLD_LEASES = text(
    "delete from lease where lease_id in (select lease_id from lease "
    "where state in ('released', 'failed') "
    "and at < now() - make_interval(secs => :keep) limit :n)"
)


@dataclass(frozen=True, slots=True)
class Lease:
    """A row of ``lease``."""

    lease_id: str
    state: str
    node: str | None


class Store:
    """burst's access to its tables."""

    def __init__(self, db: Database, outbox: Outbox, *, keep_s: float) -> None:
        self._db = db
        self._outbox = outbox
        self._keep_s = keep_s

    async def last_plan(self) -> Plan | None:
        """The plan told last, by any instance."""
        async with self._db.transaction() as connection:
            found = await _last(connection)
        return found[0] if found else None

    async def tell(self, plan: Plan, message: BurstPlan, subject: str, *, repeat_s: float) -> bool:
        """Records and publishes a plan that differs from the last one told or when that
        is older than ``repeat_s``; false where another instance has told it already."""
        async with self._db.transaction() as connection:
            await connection.execute(text("select pg_advisory_xact_lock(:k)"), {"k": PLAN_LOCK})
            found = await _last(connection)
            if found and found[1] < repeat_s and not plan.differs(found[0]):
                return False
            await connection.execute(
                text(
                    "insert into plan (bursting, utilisation, share, lease, release, reason,"
                    " pools) values (:bursting, :utilisation, :share, :lease, :release, :reason,"
                    " cast(:pools as jsonb))"
                ),
                {
                    "bursting": plan.bursting, "utilisation": plan.utilisation,
                    "share": plan.share, "lease": plan.lease, "release": plan.release,
                    "reason": plan.reason, "pools": encode(message.pools).decode(),
                },
            )  # fmt: skip
            for old in (_OLD_PLANS, _OLD_LEASES):
                await connection.execute(old, {"keep": self._keep_s, "n": PRUNE_ROWS})
            rows = await self._outbox.add(connection, [Outgoing(subject, encode(message))])
        self._outbox.sent_by_me(rows)
        return True

    async def leases(self) -> list[Lease]:
        """Leases that are not over."""
        async with self._db.transaction() as connection:
            result = await connection.execute(
                text(
                    "select lease_id, state, node from lease "
                    "where state in ('requested', 'joined', 'releasing') order by lease_id"
                )
            )
            return [Lease(*row) for row in result]

    async def add_leases(
        self, lease_ids: Sequence[str], provider: str, *, max_open: int
    ) -> list[str]:
        """Records leases before they are ordered, no more than ``max_open`` open ones in
        all; returns the recorded. Instances take turns, so they do not order twice."""
        async with self._db.transaction() as connection:
            await connection.execute(text("select pg_advisory_xact_lock(:k)"), {"k": PLAN_LOCK})
            count = await connection.execute(
                text("select count(*) from lease where state not in ('released', 'failed')")
            )
            chosen = list(lease_ids)[: max(0, max_open - count.scalar_one())]
            await connection.execute(
                text(
                    "insert into lease (lease_id, provider, state) "
                    "select unnest(cast(:ids as text[])), :provider, 'requested'"
                ),
                {"ids": chosen, "provider": provider},
            )
        return chosen

    async def move_lease(
        self, lease_id: str, state: str, *, source: str, node: str | None = None, reason: str = ""
    ) -> bool:
        """Moves a lease that is in ``source``; false where it is not."""
        async with self._db.transaction() as connection:
            result = await connection.execute(
                text(
                    "update lease set state = :state, node = coalesce(:node, node),"
                    " reason = :reason, at = now() where lease_id = :id and state = :source"
                    " returning 1"
                ),
                {"id": lease_id, "state": state, "source": source, "node": node,
                 "reason": reason},
            )  # fmt: skip
            return result.scalar() is not None


async def _last(connection: AsyncConnection) -> tuple[Plan, float] | None:
    result = await connection.execute(
        text(
            "select bursting, utilisation, share, lease, release, reason,"
            " cast(extract(epoch from now() - at) as double precision)"
            " from plan order by id desc limit 1"
        )
    )
    row = result.one_or_none()
    return (Plan(*row[:6]), row[6]) if row else None
