"""Quota arithmetic over a chain of projects."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from schemas.sandbox import SandboxSpec
from services.auth.admission import Account, Cost, admit, cost_of, give_back

most = st.none() | st.integers(0, 40)
costs = st.builds(Cost, st.integers(1, 9), st.integers(1, 9))


@st.composite
def chains(draw: st.DrawFn) -> list[Account]:
    return [
        Account(
            f"p{i}", draw(most), draw(most), draw(most),
            sandboxes=draw(st.integers(0, 10)), millicores=draw(st.integers(0, 10)),
            memory_mb=draw(st.integers(0, 10)),
        )
        for i in range(draw(st.integers(1, 4)))
    ]  # fmt: skip


def within(account: Account) -> bool:
    pairs = (
        (account.sandboxes, account.sandboxes_max),
        (account.millicores, account.millicores_max),
        (account.memory_mb, account.memory_mb_max),
    )
    return all(limit is None or used <= limit for used, limit in pairs)


@given(chains(), st.lists(st.tuples(costs, st.integers(1, 12)), max_size=6))
def test_nothing_is_overfilled_and_nothing_that_fits_is_refused(
    chain: list[Account], runs: list[tuple[Cost, int]]
) -> None:
    accounts = {a.project: a for a in chain}
    path = [a.project for a in chain]
    for cost, count in runs:
        good_before = [within(a) for a in chain]
        fits, error = admit(accounts, path, cost, count)
        assert (error is None) == (fits == count)
        if fits:
            assert all(within(a) for a, good in zip(chain, good_before, strict=True) if good)
        if error is not None:
            one_more, _ = admit(accounts, path, cost, 1)
            assert one_more == 0
            assert error.details["project"] in accounts
            assert str(error.field).startswith("quota.")


@given(chains(), costs, st.integers(1, 12))
def test_what_is_given_back_is_what_was_taken(
    chain: list[Account], cost: Cost, count: int
) -> None:
    accounts = {a.project: a for a in chain}
    path = [a.project for a in chain]
    before = [(a.sandboxes, a.millicores, a.memory_mb) for a in chain]
    fits, _ = admit(accounts, path, cost, count)
    assert all(a.added == [fits, fits * cost.millicores, fits * cost.memory_mb] for a in chain)
    give_back(accounts, path, cost, fits)
    assert before == [(a.sandboxes, a.millicores, a.memory_mb) for a in chain]
    assert all(a.added == [0, 0, 0] for a in chain)


def test_of_equally_full_projects_the_nearest_is_named() -> None:
    accounts = {p: Account(p, sandboxes_max=1) for p in ("root", "leaf")}
    fits, error = admit(accounts, ["root", "leaf"], Cost(1, 1), 2)
    assert fits == 1
    assert error is not None
    assert error.details["project"] == "leaf"


@given(st.floats(0.5, 100), st.lists(st.floats(0, 2), min_size=1, max_size=20))
def test_a_rate_is_kept_over_time(rate: float, steps: list[float]) -> None:
    account = Account("p", rate=rate)
    now, admitted = 1000.0, 0
    account.refill(now, burst_s=1.0)
    burst = account.tokens or 0.0
    for step in steps:
        now += step
        account.refill(now, burst_s=1.0)
        fits, error = admit({"p": account}, ["p"], Cost(1, 1), 1000)
        admitted += fits
        assert error is not None
        assert error.retry_after_s is not None
        assert 0 <= error.retry_after_s <= 1 / rate + 1e-9
    assert admitted <= burst + (now - 1000.0) * rate + 1e-6


def test_a_clock_that_goes_back_refills_nothing() -> None:
    account = Account("p", rate=1.0)
    account.refill(100.0, burst_s=1.0)
    admit({"p": account}, ["p"], Cost(1, 1), 1)
    account.refill(50.0, burst_s=1.0)
    account.refill(100.0, burst_s=1.0)
    assert account.tokens == 0.0


def test_a_sandbox_costs_its_request_else_its_limit_else_the_default() -> None:
    def cost(**fields: object) -> Cost:
        return cost_of(SandboxSpec(**fields), default_cores=1.0, default_memory_mb=512)  # type: ignore[arg-type]

    assert cost() == Cost(1000, 512)
    assert cost(cpu_cores_limit=0.1, memory_limit_mb=64) == Cost(100, 64)
    assert cost(
        cpu_cores_limit=2.0, cpu_cores_request=0.5, memory_limit_mb=64, memory_request_mb=32
    ) == Cost(500, 32)
    assert cost(cpu_cores_limit=0.0001).millicores == 1
