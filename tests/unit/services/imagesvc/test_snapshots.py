"""Snapshots at imagesvc: names, and what a project's own scrub adds."""

from __future__ import annotations

import pytest

from schemas.image import SnapshotCreate
from services.imagesvc.snapshots import left_out, name_of, scrub_rules
from shared.errors import InvalidRequest

ID = "01k2h7v8n0abcdefghjkmnpqrs"


def asked(**more: object) -> SnapshotCreate:
    return SnapshotCreate(request_id=ID, uid=ID, **more)  # type: ignore[arg-type]


def test_a_snapshot_without_a_name_gets_one() -> None:
    assert str(name_of(asked())) == f"snapshot/{ID}:latest"
    assert str(name_of(asked(name="made:1"))) == "made:1"
    with pytest.raises(InvalidRequest):
        name_of(asked(name="a//b"))


def test_a_projects_rules_hold_in_it_and_below_it() -> None:
    rules = scrub_rules('{"top": ["/opt/keys/**"], "other": ["/x"]}')
    mine = asked(scrub=True, remove=["/mine"])
    assert left_out(mine, ["below", "top"], rules) == ["/mine", "/opt/keys/**"]
    assert left_out(asked(remove=["/mine"]), ["below", "top"], rules) == ["/mine"]
    assert left_out(asked(scrub=True), ["elsewhere"], rules) == []


@pytest.mark.parametrize("text", ["", "[]", '{"p": "/x"}', '{"p": ["relative"]}'])
def test_rules_that_cannot_be_read_are_named(text: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        scrub_rules(text)
    assert refused.value.field == "image_scrub"
