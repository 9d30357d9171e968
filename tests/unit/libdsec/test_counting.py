"""What a process counts of the system's cost to it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from libdsec import DSecClient, Sandbox, counting
from libdsec._calls import Attempts
from libdsec._wire import SandboxInfo
from libdsec.rollout import Result
from libdsec.rollout._messages import noted


def test_a_rollout_that_the_infrastructure_failed_is_masked_and_others_are_not() -> None:
    before = counting.counts()["masked"]["rollout"]
    noted(Result(0, 0, 0, value=1))
    noted(Result(1, 0, 1, error="its own mistake"))
    assert counting.counts()["masked"]["rollout"] == before
    noted(Result(2, 0, 2, error="the node is gone", is_infra=True))
    assert counting.counts()["masked"]["rollout"] == before + 1


async def test_what_is_asked_again_and_what_was_lost_are_counted() -> None:
    before = counting.counts()
    await Attempts(10.0).pause(TimeoutError(), "no answer")
    client = DSecClient("nats://h:1", f"dsec_01k0000000000000000000peer_{'s' * 40}", "acme")
    again: Any = SimpleNamespace(token="a")
    client._core.operations.rename(again, "b")
    for infra in (True, False):
        sandbox = Sandbox(client._core, "u", project="acme", state="running", id="n-u")
        over = SandboxInfo(
            uid="0" * 26, project="acme", state="lost", generation=1, backend="fake",
            created_at=0.0, changed_at=0.0, is_infra=infra,
        )  # fmt: skip
        for _ in range(2):  # once for each
            sandbox._seen(over)
    after = counting.counts()
    assert after["lost"]["sandbox"] - before["lost"]["sandbox"] == 1
    for what in ("request", "operation"):
        assert after["retried"][what] - before["retried"][what] == 1


def test_a_program_with_metrics_gets_them_there_too() -> None:
    reader = InMemoryMetricReader()
    metrics.set_meter_provider(MeterProvider([reader]))
    for name, kinds in counting.WHAT.items():
        for what in kinds:
            counting.count(name, what)
    data = reader.get_metrics_data()
    assert data is not None
    found = {
        (metric.name, dict(point.attributes)["what"])
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        for point in metric.data.data_points
    }
    wanted = {(f"dsec.client.{n}", what) for n, kinds in counting.WHAT.items() for what in kinds}
    assert found == wanted
