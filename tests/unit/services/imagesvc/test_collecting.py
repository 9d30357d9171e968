"""How rarely cycles of garbage are looked for during an import."""

from __future__ import annotations

import gc

import pytest

from services.imagesvc.collecting import RARELY, searched_rarely


def test_the_last_to_leave_brings_the_usual_measure_back() -> None:
    usual = gc.get_threshold()
    first, second = searched_rarely(), searched_rarely()
    first.__enter__()
    second.__enter__()
    assert gc.get_threshold() == (RARELY, *usual[1:])
    first.__exit__(None, None, None)
    assert gc.get_threshold() == (RARELY, *usual[1:])
    second.__exit__(None, None, None)
    assert gc.get_threshold() == usual


def test_a_failure_brings_it_back_too() -> None:
    usual = gc.get_threshold()
    with pytest.raises(ValueError), searched_rarely():  # noqa: PT011
        raise ValueError
    assert gc.get_threshold() == usual


def test_who_has_switched_it_off_keeps_it_off() -> None:
    usual = gc.get_threshold()
    gc.set_threshold(0)
    try:
        with searched_rarely():
            assert gc.get_threshold()[0] == 0
        assert gc.get_threshold()[0] == 0
    finally:
        gc.set_threshold(*usual)
