"""The programs of the way out, on a kernel that is older than the one they were written on."""

from __future__ import annotations

from services.edge.drivers.container.settings import GUEST_BUILD
from services.edge.egress.kernelmaps import Kernel
from tests.integration.edge.test_turned import (  # noqa: F401
    group,
    kernel,
    places,
    test_a_connection_is_known_by_where_it_was_to_go,
    test_what_was_not_turned_has_no_origin,
    test_without_a_policy_nothing_is_turned,
)  # fmt: skip


def test_this_kernel_takes_them() -> None:
    """Where it does not, the others are skipped."""
    Kernel(GUEST_BUILD / "bpf" / "egress.o").close()
