"""Admission: by commitments, by measurement, and by name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.edge.admission import Amount, Limits, Measured, admit

ROOMY = Measured(memory_available_mb=1 << 20, disk_free_mb=1 << 20, pids_free=1 << 20)
amounts = st.builds(
    Amount,
    cores=st.integers(0, 640).map(lambda n: n / 10),
    memory_mb=st.integers(0, 1 << 16),
    sandboxes=st.integers(0, 50),
)
demands = st.builds(
    Amount,
    cores=st.integers(0, 160).map(lambda n: n / 10),
    memory_mb=st.integers(0, 1 << 14),
    sandboxes=st.just(1),
    disk_mb=st.integers(0, 1 << 14),
)


def fits(total: Amount, capacity: Amount) -> bool:
    return (
        total.sandboxes <= capacity.sandboxes
        and total.memory_mb <= capacity.memory_mb
        and total.disk_mb <= capacity.disk_mb
        and total.cores <= capacity.cores + 1e-3
    )


@given(amounts, st.lists(demands, max_size=80))
def test_what_is_admitted_never_exceeds_the_capacity(
    capacity: Amount, demanded: list[Amount]
) -> None:
    """(B11)"""
    committed, limits = Amount(), Limits(capacity)
    for demand in demanded:
        if admit(demand, committed=committed, limits=limits, measured=ROOMY) is None:
            committed = committed.plus(demand)
    assert fits(committed, capacity)


@given(amounts, amounts, demands)
def test_only_what_does_not_fit_is_refused(
    capacity: Amount, committed: Amount, demand: Amount
) -> None:
    refusal = admit(demand, committed=committed, limits=Limits(capacity), measured=ROOMY)
    if fits(committed.plus(demand), capacity):
        assert refusal is None
    elif refusal is not None:
        assert refusal.field in (
            "sandboxes", "memory_limit_mb", "cpu_cores_limit", "disk_limit_mb",
        )  # fmt: skip
        assert refusal.retryable and refusal.cause == "capacity"


@given(amounts, demands)
def test_giving_back_restores_the_room(committed: Amount, demand: Amount) -> None:
    back = committed.plus(demand).minus(demand)
    assert back.memory_mb == committed.memory_mb and back.sandboxes == committed.sandboxes
    assert back.cores == pytest.approx(committed.cores)


def test_the_last_tenth_of_a_core_is_not_lost_to_rounding() -> None:
    limits, committed = Limits(Amount(1.0, 100, 100)), Amount()
    for _ in range(10):
        demand = Amount(0.1, 1, 1)
        assert admit(demand, committed=committed, limits=limits, measured=ROOMY) is None
        committed = committed.plus(demand)
    assert admit(Amount(0.1, 1, 1), committed=committed, limits=limits, measured=ROOMY)


@pytest.mark.parametrize(
    ("measured", "field"),
    [
        (Measured(511, 9_999, 9_999), "memory"),
        (Measured(9_999, 99, 9_999), "disk"),
        (Measured(9_999, 9_999, 9), "pids"),
        (Measured(9_999, 9_999, 9_999, {"memory": 0.5}), "pressure.memory"),
        (Measured(9_999, 9_999, 9_999, {"memory": 0.4, "io": 0.9}), None),
    ],
)
def test_the_machine_has_the_last_word(measured: Measured, field: str | None) -> None:
    limits = Limits(
        Amount(99, 99_999, 99), memory_floor_mb=512, disk_floor_mb=100, pids_floor=10,
        pressure={"memory": 0.4, "io": 0.9},
    )  # fmt: skip
    refusal = admit(Amount(sandboxes=1), committed=Amount(), limits=limits, measured=measured)
    assert (refusal.field if refusal else None) == field
