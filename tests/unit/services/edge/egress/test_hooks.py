"""Programs of an object file: loaded once, refused once."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.edge.egress import hooks
from services.edge.egress.hooks import Hooks
from shared.errors import Unavailable, Unsupported


class FakePrograms:
    """``refuses`` is the hook that the kernel does not take."""

    made: list[FakePrograms]
    refuses = ""

    def __init__(self, _path: Path) -> None:
        self.attached: list[str] = []
        self.closed = False
        FakePrograms.made.append(self)

    def attach_hook(self, name: str) -> None:
        if name == FakePrograms.refuses:
            raise Unsupported("EPERM", field="policy")
        self.attached.append(name)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    FakePrograms.made = []
    monkeypatch.setattr(hooks, "Programs", FakePrograms)
    monkeypatch.setattr(FakePrograms, "refuses", "")
    program = tmp_path / "some.o"
    program.touch()
    return program


def nothing(_raw: bytes) -> None: ...


def test_it_is_loaded_once_and_again_after_it_was_closed(built: Path) -> None:
    made = Hooks(built, ["one", "two"], nothing)
    assert made.open() and not made.open()
    made.close()
    made.close()
    assert made.open()
    assert [(p.attached, p.closed) for p in FakePrograms.made] == [
        (["one", "two"], True), (["one", "two"], False),
    ]  # fmt: skip


def test_what_the_kernel_refuses_is_not_tried_again_and_none_of_it_stays(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakePrograms, "refuses", "two")
    made = Hooks(built, ["one", "two"], nothing)
    for _ in range(2):
        with pytest.raises(Unsupported, match="EPERM"):
            made.open()
    assert [p.closed for p in FakePrograms.made] == [True]


def test_what_is_not_built_is_named_and_may_be_built_later(
    tmp_path: Path, built: Path
) -> None:
    made = Hooks(tmp_path / "other.o", ["one"], nothing)
    with pytest.raises(Unavailable, match=r"other\.o is not built"):
        made.open()
    built.rename(tmp_path / "other.o")
    assert made.open()
