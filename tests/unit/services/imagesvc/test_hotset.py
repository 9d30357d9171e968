"""The hot set: enough sandboxes, no layer for nothing, the bytes of the best choice."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from services.imagesvc.hotset import Choice, Environment, choose

DIGESTS = "abcdef"
ENVIRONMENTS = st.lists(
    st.builds(
        Environment,
        st.lists(st.sampled_from(DIGESTS), min_size=1, max_size=3, unique=True).map(tuple),
        st.integers(1, 100),
    ),
    max_size=8,
)
COSTS = st.fixed_dictionaries({digest: st.integers(1, 1000) for digest in DIGESTS})


def served(environments: list[Environment], layers: tuple[str, ...]) -> int:
    return sum(one.sandboxes for one in environments if set(one.layers) <= set(layers))


@given(ENVIRONMENTS, COSTS, st.floats(0, 1))
def test_the_share_is_reached_and_nothing_is_there_for_nothing(
    environments: list[Environment], costs: dict[str, int], share: float
) -> None:
    made = choose(environments, costs, share)
    total = sum(one.sandboxes for one in environments)
    assert (made.total, len(set(made.layers))) == (total, len(made.layers))
    assert made.sandboxes >= share * total
    assert served(environments, made.layers) >= made.sandboxes
    named = {digest for one in environments for digest in one.layers}
    assert set(made.layers) <= named
    assert choose(environments[::-1], costs, 1.0).sandboxes == total


def test_shared_bases_are_counted_once_and_the_best_come_first() -> None:
    environments = [
        Environment(("base", "a"), 50), Environment(("base", "b"), 30),
        Environment(("base", "c"), 15), Environment(("rare", "d"), 5),
    ]  # fmt: skip
    costs = {"base": 1000, "a": 10, "b": 10, "c": 10, "rare": 5000, "d": 1}
    assert choose(environments, costs, 0.5) == Choice(("base", "a"), 50, 100)
    assert choose(environments, costs, 0.95).layers == ("base", "a", "b", "c")
    assert set(choose(environments, costs, 1.0).layers) == set(costs)
    assert choose(environments, costs, 0.0) == Choice((), 0, 100)
    assert choose([], costs, 0.9) == Choice((), 0, 0)


def test_what_a_later_choice_made_needless_is_left_out() -> None:
    """The best worth per byte comes first, and is not needed in the end."""
    environments = [Environment(("small",), 10), Environment(("large",), 90)]
    costs = {"small": 1, "large": 100}
    assert choose(environments, costs, 0.9).layers == ("large",)


def test_environments_whose_layers_are_gone_are_not_served() -> None:
    environments = [Environment(("a",), 60), Environment(("a", "gone"), 40)]
    made = choose(environments, {"a": 1}, 0.9)
    assert (made.layers, made.share) == (("a",), 0.6)


def test_it_is_close_to_the_smallest_set() -> None:
    environments = [
        Environment((f"base{k % 2}", f"work{k}"), 10 + 7 * k % 13) for k in range(8)
    ]
    costs = {f"base{k}": 300 + 50 * k for k in range(2)} | {f"work{k}": 20 + k for k in range(8)}
    made = choose(environments, costs, 0.8)
    bytes_ = sum(costs[digest] for digest in made.layers)
    wanted = 0.8 * sum(one.sandboxes for one in environments)
    smallest = min(
        sum(costs[digest] for digest in layers)
        for size in range(len(costs) + 1)
        for layers in combinations(costs, size)
        if served(environments, layers) >= wanted
    )
    assert smallest <= bytes_ <= 1.1 * smallest
