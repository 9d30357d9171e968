"""What is generated from the schemas is current and stands alone."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from schemas import asyncapi, export, sdk_source
from schemas.registry import MESSAGES, full_name
from schemas.streams import DURABLES, STREAMS
from schemas.subjects import SUBJECTS


def test_generated_files_are_current() -> None:
    assert export.stale() == [], "run `python -m schemas.export`"


def test_check_is_an_exit_code() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "schemas.export", "--check"],
        cwd=export.ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def test_check_finds_what_is_not_current(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(export, "ROOT", tmp_path)
    monkeypatch.setattr(export, "GENERATED", tmp_path / "generated")
    monkeypatch.setattr(export, "LOCK", tmp_path / "generated" / "v1.lock.json")
    monkeypatch.setattr(export, "WIRE", tmp_path / "_wire.py")
    assert export.main([]) == 0
    assert export.main(["--check"]) == 0
    (tmp_path / "_wire.py").write_text("# edited by hand\n")
    (tmp_path / "generated" / "Gone.v1.json").write_text("{}")
    assert export.main(["--check"]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "not current: _wire.py",
        "not current: generated/Gone.v1.json",
    ]


def test_the_sdks_types_import_only_msgspec() -> None:
    tree = ast.parse(sdk_source.source())
    found = {
        name.name if isinstance(node, ast.Import) else node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in node.names
    }
    assert found == {"__future__", "typing", "msgspec"}


def test_every_subject_names_a_message_and_every_stored_one_a_stream() -> None:
    document = asyncapi.document()
    assert len(document["channels"]) == len(SUBJECTS)
    streams = {s.name for s in STREAMS}
    for subject in SUBJECTS:
        assert subject.message in MESSAGES
        channel = document["channels"][asyncapi._channel_id(subject)]
        assert (channel.get("x-stream") in streams) == (subject.transport == "jetstream")
    assert set(document["x-streams"]) == streams
    assert {d.name for d in DURABLES} < set(document["x-durables"])


def test_references_of_the_document_resolve() -> None:
    document = json.loads((export.GENERATED / "asyncapi.json").read_text())

    def refs(value: object) -> list[str]:
        if isinstance(value, dict):
            here = [value["$ref"]] if "$ref" in value else []
            return here + [r for v in value.values() for r in refs(v)]
        return [r for v in value for r in refs(v)] if isinstance(value, list) else []

    for ref in refs(document):
        if ref.startswith("#/"):
            place: object = document
            for part in ref[2:].split("/"):
                place = place[part]  # type: ignore[index]
        else:
            assert (export.GENERATED / ref).exists(), ref


@pytest.mark.parametrize("name", sorted(MESSAGES))
def test_every_message_has_a_schema_and_words(name: str) -> None:
    schema = json.loads((export.GENERATED / f"{full_name(name)}.json").read_text())
    assert schema["$ref"] == f"#/$defs/{name}"
    assert MESSAGES[name].__doc__
