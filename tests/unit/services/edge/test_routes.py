"""Which addresses a node knows by name, and specs that ask for others."""

from __future__ import annotations

import pytest

from schemas.sandbox import SandboxSpec
from services.edge import rules
from services.edge.drivers.base import BackendReport, Feature
from services.edge.routes import Address, parse
from shared.errors import InvalidRequest

BUS = "nats://10.0.0.1:4222"


def test_the_bus_is_known_and_others_are_written_down() -> None:
    known = parse("model=10.0.0.7:8000, web=[::1]:80", bus=BUS)
    assert known == {
        "bus": Address("10.0.0.1", 4222), "model": Address("10.0.0.7", 8000),
        "web": Address("::1", 80),
    }  # fmt: skip
    assert parse("", bus="nats://user:word@host:1,nats://other:2") == {"bus": Address("host", 1)}


@pytest.mark.parametrize(
    "text", ["model", "model=", "model=host", "model=host:0", "model=host:x", "M=host:1",
             "bus=host:1", "=host:1", "model=:80"],
)  # fmt: skip
def test_what_is_no_route_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(text, bus=BUS)
    assert caught.value.field == "routes"


def test_a_node_gives_the_routes_it_knows_by_backends_that_carry_them() -> None:
    spec = SandboxSpec(routes={"model": 8000, "bus": 4222})
    assert rules.check_routes(spec, {"bus", "model", "web"}) is None
    refused = rules.check_routes(spec, {"bus"})
    assert refused is not None and refused.field == "routes" and "model" in refused.message
    assert rules.check_spec(spec, BackendReport(True, "", {"routes": Feature(True)})) is None
    without = rules.check_spec(spec, BackendReport(True, "", {}))
    assert without is not None and without.field == "routes"
