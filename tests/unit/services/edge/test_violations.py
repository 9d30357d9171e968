"""What waits to be told: bounded in number, exact in count."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from schemas.audit import Violation
from services.edge.violations import Waiting

KINDS = st.tuples(
    st.sampled_from(["a", "b", "c"]), st.sampled_from(["bpf_net", "dns"]),
    st.integers(1, 1000), st.integers(0, 3),
)  # fmt: skip


def violation(uid: str, source: str, count: int, lost: int = 0) -> Violation:
    return Violation(
        id="x", at=1.0, node="n", uid=uid, project="p", source=source, verdict="denied",
        rule="r", mechanism="m", count=count, lost=lost,
    )  # fmt: skip


@given(st.lists(KINDS, max_size=60), st.integers(1, 8))
def test_no_count_is_lost_however_little_may_wait(
    seen: list[tuple[str, str, int, int]], most: int
) -> None:
    waiting = Waiting(most)
    for one in seen:
        waiting.add(violation(*one))
        assert len(waiting) <= most
    told: list[Violation] = []
    while waiting:
        batch = waiting.take(3)
        assert batch and len({(v.source, v.verdict) for v in batch}) == 1
        told += batch
    assert sum(v.count + v.lost for v in told) == sum(count + lost for *_, count, lost in seen)


def test_what_was_not_taken_is_told_first() -> None:
    waiting = Waiting()
    for count in (1, 2, 3):
        waiting.add(violation("a", "dns", count))
    batch = waiting.take(2)
    waiting.put_back(batch)
    assert [v.count for v in waiting.take(9)] == [1, 2, 3]
