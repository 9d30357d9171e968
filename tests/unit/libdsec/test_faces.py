"""Both faces have the same names and signatures; everything shows itself."""

from __future__ import annotations

import inspect

import pytest

import libdsec
from libdsec import DSecClient, _sync_stub, sync
from libdsec._command import command_request
from libdsec._faces import FACES, MODULES

KEY = f"dsec_01k0000000000000000000peer_{'s' * 40}"
DUNDERS = {"__aenter__": "__enter__", "__aexit__": "__exit__", "__anext__": "__next__"}


def public(source: type) -> dict[str, object]:
    return {
        name: member
        for name, member in inspect.getmembers(source)
        if not name.startswith("_") or name in DUNDERS
    }


@pytest.mark.parametrize("name", sorted(FACES))
def test_names_and_signatures_are_the_same(name: str) -> None:
    source, face = FACES[name][0], getattr(sync, name)
    for member, value in public(source).items():
        other = getattr(face, DUNDERS.get(member, member))
        if isinstance(value, property):
            assert isinstance(other, property)
            continue
        if callable(value) and member not in DUNDERS:
            assert not inspect.iscoroutinefunction(other)
            assert not inspect.isasyncgenfunction(other)
            assert inspect.signature(other) == inspect.signature(value), member
            assert other.__doc__ == value.__doc__, member


@pytest.mark.parametrize("name", sorted(FACES))
def test_the_synchronous_face_has_nothing_more(name: str) -> None:
    source, attributes = FACES[name]
    face = {n for n in dir(getattr(sync, name)) if not n.startswith("_")}
    assert face == {n for n in public(source) if n not in DUNDERS} | set(attributes)


def test_both_export_the_same() -> None:
    assert set(libdsec.__all__) <= set(sync.__all__)
    for name in libdsec.__all__:
        other = getattr(sync, name)
        assert other is getattr(libdsec, name) or name in FACES


def test_the_types_of_the_synchronous_face_are_current() -> None:
    for path, text in _sync_stub.stubs().items():
        assert path.read_text() == text, "run `python -m libdsec._sync_stub`"


@pytest.mark.parametrize("name", sorted(MODULES))
def test_modules_beside_the_client_have_both_faces(name: str) -> None:
    part, other = MODULES[name], getattr(sync, name)
    assert other.__all__ == part.source.__all__
    for member in part.source.__all__:
        ours, theirs = getattr(part.source, member), getattr(other, member)
        if member in part.functions:
            assert inspect.iscoroutinefunction(ours)
            assert not inspect.iscoroutinefunction(theirs)
            assert inspect.signature(ours) == inspect.signature(theirs)
            assert ours.__doc__ == theirs.__doc__
        elif member in part.faces:
            attributes = set(part.faces[member][1])
            face = {n for n in dir(theirs) if not n.startswith("_")}
            assert face == {n for n in public(ours) if n not in DUNDERS} | attributes
        else:
            assert ours is theirs


def test_public_methods_have_docstrings() -> None:
    bare = [
        f"{name}.{member}"
        for name, (source, _) in FACES.items()
        for member, value in public(source).items()
        if member not in DUNDERS and not inspect.getdoc(value)
    ]
    assert bare == []


def test_arguments_after_the_second_are_keywords() -> None:
    loose = []
    for name, (source, _) in FACES.items():
        for member, value in public(source).items():
            if not callable(value) or member in DUNDERS:
                continue
            kinds = [p.kind for p in inspect.signature(value).parameters.values()]
            if kinds.count(inspect.Parameter.POSITIONAL_OR_KEYWORD) > 3:  # self and two
                loose.append(f"{name}.{member}")
    assert loose == []


def test_what_cannot_be_awaited_yet_shows_itself() -> None:
    client = DSecClient("nats://h:1", KEY, "acme")
    assert repr(client) == "DSecClient('nats://h:1', project='acme', closed)"
    assert repr(client.images) == "Images(project='acme')"
    sandbox = libdsec.Sandbox(
        client._core, "u", project="acme", state="running", id="n-u", labels={"a": "b"}
    )
    assert repr(sandbox) == "Sandbox('n-u', state='running', labels={'a': 'b'})"
    assert "n-u" in repr(sandbox.files)
    result = libdsec.ExecResult(exit_code=1, stdout=b"x" * 100, timed_out=True)
    assert "…(100 bytes)" in repr(result)
    assert "timed_out" in repr(result)


def test_a_command_is_a_line_or_an_argv() -> None:
    line = command_request(("ls -l",), timeout=None)
    assert (line.shell, line.argv) == ("ls -l", None)
    words = command_request(("ls", "-l"), timeout=None)
    assert (words.shell, words.argv) == (None, ["ls", "-l"])
    listed = command_request((["ls"],), timeout=1)
    assert (listed.argv, listed.timeout_s) == (["ls"], 1.0)
