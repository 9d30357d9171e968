"""The items of a request settle once, in any order of answers and reads."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from libdsec import Forbidden, SandboxDied, _create, _ids
from libdsec._calls import Mailbox
from libdsec._create import Creation
from libdsec._wire import ItemResult, SandboxInfo, WireError

REQUEST = "01k0000000000000000000peer"
STATES = ["requested", "placed", "starting", "running", "paused", "stopped", "failed"]


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from(STATES), st.booleans()), max_size=40))
def test_the_first_settled_state_counts(news: list[tuple[int, str, bool]]) -> None:
    creation, expected = Creation(REQUEST, 4), dict[int, str]()
    for index, state, by_read in news:
        uid = _ids.item_uid(REQUEST, index)
        if by_read:
            creation.apply_info(
                SandboxInfo(
                    uid=uid, project="p", state=state, generation=1, backend="fake",
                    created_at=0, changed_at=0,
                )
            )  # fmt: skip
        else:
            creation.apply(ItemResult(index=index, uid=uid, state=state))
        if index < 4 and state not in ("requested", "placed", "starting"):
            expected.setdefault(index, state)
    assert {i: m.state for i, m in creation.items.items()} == expected
    assert creation.settled == (len(expected) == 4)
    assert len(creation.open_uids) == 4 - len(expected)
    for made in creation.items.values():
        assert (made.error is not None) == (made.state in ("stopped", "failed"))


def test_an_items_error_is_its_own() -> None:
    creation = Creation(REQUEST, 2)
    error = WireError(code="forbidden", message="no")
    creation.apply(
        ItemResult(index=1, uid=_ids.item_uid(REQUEST, 1), state="rejected", error=error)
    )
    creation.apply(ItemResult(index=0, uid=REQUEST, state="running", id="n-u", node="n"))
    first, second = creation.in_order()
    assert (first.error, first.id) == (None, "n-u")
    assert isinstance(second.error, Forbidden)
    assert not isinstance(second.error, SandboxDied)


async def test_before_time_is_up_for_a_sandbox_its_state_is_read() -> None:
    """The answer is lost, or lies unread because the process stood still until now."""
    creation = Creation(REQUEST, 1)

    async def sandboxes(*_: object) -> AsyncIterator[SandboxInfo]:
        yield SandboxInfo(
            uid=_ids.item_uid(REQUEST, 0), project="p", state="running", generation=1,
            backend="fake", created_at=0, changed_at=0,
        )  # fmt: skip

    core: Any = SimpleNamespace(sandboxes=sandboxes)
    await _create._settle(core, "p", creation, Mailbox("s", "a"), time.monotonic() - 60)
    assert [made.state for made in creation.in_order()] == ["running"]
