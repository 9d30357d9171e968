"""Lists as messages: whole, in order, and no larger than the bus carries."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from schemas.base import PORTION_BYTES, WireError, decode, portions
from schemas.sandbox import EdgeOp, ItemResult, OpReply
from services.scheduler import sending
from services.scheduler.model import NodeOp
from shared import ids

SERVER_BYTES = 1 << 20
"""What a NATS server takes that nobody has configured."""
MANY = 20_000
REQUEST = ids.new()


@given(sizes=st.lists(st.integers(0, PORTION_BYTES + 10), max_size=30), count=st.integers(1, 8))
def test_portions_are_all_of_it_in_order_within_their_bounds(sizes: list[int], count: int) -> None:
    items = [bytes(size) for size in sizes]
    found = list(portions(items, count=count))
    assert [item for part in found for item in part] == items
    for part in found:
        assert 1 <= len(part) <= count
        assert len(part) == 1 or sum(map(len, part)) <= PORTION_BYTES


def result(number: int, error: WireError | None = None) -> ItemResult:
    uid = ids.new()
    return ItemResult(
        index=number, uid=uid, state="paused", node="n" * 60, id=f"{'n' * 60}-{uid}", error=error
    )


def test_results_of_a_large_job_fit_a_server_that_nobody_configured() -> None:
    error = WireError(code="unavailable", message="a node is silent " * 20, is_infra=True)
    results = [result(n, error) for n in range(MANY)]
    messages = sending.op_replies("inbox", REQUEST, results)
    replies = [decode(m.data, OpReply) for m in messages]
    assert max(len(m.data) for m in messages) < SERVER_BYTES
    assert [r.last for r in replies] == [False] * (len(replies) - 1) + [True]
    assert [i for r in replies for i in r.results] == results


def test_an_operation_on_nothing_is_answered_too() -> None:
    (message,) = sending.op_replies("inbox", REQUEST, [])
    assert decode(message.data, OpReply) == OpReply(request_id=REQUEST, results=[], last=True)


def test_operations_on_a_large_job_fit_too() -> None:
    trace = f"00-{'a' * 32}-{'b' * 16}-01"
    ops = [NodeOp("n1", "pause", ids.new(), "p" * 63, n, trace=trace) for n in range(MANY)]
    messages = sending.node_ops(ops, None)
    assert max(len(m.data) for m in messages) < SERVER_BYTES
    told = [i.uid for m in messages for i in decode(m.data, EdgeOp).items]
    assert told == [op.uid for op in ops]
