"""What is watched under a policy."""

from __future__ import annotations

from services.edge.drivers.base import Feature
from services.edge.policy.plan import compile_policy
from services.edge.policy.watched import DECOY, PROGRAM_FOLDERS, watched
from shared import policies
from tests.unit.services.edge.policy.test_plan import ALL


def paths(document: dict[str, object], kind: str) -> list[str]:
    return [one.path for one in watched(policies.read(document, {})) if one.kind == kind]


def test_what_is_hidden_is_watched_once_and_denied() -> None:
    document = {"files": {"hidden": ["/opt/answers", "/proc/kpagecgroup"]}}
    found = [one for one in watched(policies.read(document, {})) if one.kind == "mount"]
    assert [one.path for one in found[:3]] == [DECOY, "/opt/answers", "/proc/kpagecgroup"]
    assert len({one.path for one in found}) == len(found)
    assert {one.rule for one in found if one.denied} == {"files.hidden", "kernel.memory"}


def test_programs_that_cannot_be_written_to_are_not_watched() -> None:
    assert paths({"files": {"read_only": ["/"]}}, "file") == []
    some = paths({"files": {"read_only": ["/usr", "/bin?"]}}, "file")
    assert {path.rpartition("/")[0] for path in some} == {"/sbin"}
    assert {p.rpartition("/")[0] for p in paths({}, "file")} == set(PROGRAM_FOLDERS)


def test_a_sandbox_without_a_policy_and_a_node_without_sensors_watch_nothing() -> None:
    document = {"files": {"hidden": ["/opt/answers"]}}
    able = {**ALL, "sensors": Feature(True, "fanotify")}
    assert compile_policy(policies.read(document, {}), able).watches
    assert not compile_policy(policies.read(document, {}), ALL).watches
    assert not compile_policy(policies.read(None, {}), able).watches
    assert not compile_policy(policies.read(None, {"pypi": False}), able).mounts
