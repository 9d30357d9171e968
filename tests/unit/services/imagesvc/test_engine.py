"""A container engine as a source: whose images are read, which are removed."""

from __future__ import annotations

import time
from typing import Any

import pytest

from services.imagesvc.engine import BUILT_KEEP_S, LABEL, DockerEngine, is_name_of
from shared.errors import NotFound

ID = "sha256:" + "ab" * 32


class Image:
    """One image of the engine, found by whatever it is asked for."""

    def __init__(self, tags: list[str], labels: dict[str, str]) -> None:
        self.attrs: dict[str, Any] = {"RepoTags": tags, "RepoDigests": [f"a/b@{ID}"]}
        self.labels = labels

    def save(self, *, chunk_size: int) -> list[bytes]:
        return [b"saved"]


class Images:
    """The engine's images, by either of the client's two interfaces."""

    def __init__(self, image: Image | None, listed: list[dict[str, Any]]) -> None:
        self.image, self.listed, self.removed = image, listed, list[str]()

    def get(self, reference: str) -> Image:
        assert self.image is not None
        return self.image

    def images(self, *, filters: dict[str, str]) -> list[dict[str, Any]]:
        assert filters == {"label": LABEL}
        return self.listed

    def remove(self, image: str, *, force: bool) -> None:
        self.removed.append(image)


class Client:
    """A client of the engine."""

    def __init__(self, image: Image | None = None, listed: list[dict[str, Any]] | None = None):
        self.images = self.api = Images(image, listed or [])

    def close(self) -> None: ...


def engine(client: Client, monkeypatch: pytest.MonkeyPatch) -> DockerEngine:
    made = DockerEngine()
    monkeypatch.setattr(made, "_client", lambda timeout_s=None: client)
    return made


@pytest.mark.parametrize(
    "reference", ["a/b", "a/b:latest", "docker.io/a/b", f"a/b@{ID}", f"a/b:9@{ID}"]
)
def test_an_image_is_read_by_its_names(reference: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = engine(Client(Image(["a/b:latest"], {})), monkeypatch)
    assert list(made.save(reference)) == [b"saved"]


@pytest.mark.parametrize("reference", [ID, ID[:19], "abab", "a/b:1", "b", f"b@{ID}"])
def test_no_image_is_read_by_its_id(reference: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = engine(Client(Image(["a/b:latest"], {})), monkeypatch)
    with pytest.raises(NotFound):
        list(made.save(reference))


def test_what_is_being_built_is_read_by_its_builder_only(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    made = engine(Client(Image(["a/b:latest"], {LABEL: "1"})), monkeypatch)
    with pytest.raises(NotFound):
        list(made.save("a/b"))
    assert list(made.save(ID, built=True)) == [b"saved"]


def test_the_hub_need_not_be_named() -> None:
    assert is_name_of("docker.io/library/x", {"RepoTags": ["x:latest"]})
    assert is_name_of("host:5000/x", {"RepoTags": ["host:5000/x:latest"]})
    assert not is_name_of("x", {"RepoTags": None})


def test_old_builds_that_nobody_named_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    now, old = time.time(), time.time() - BUILT_KEEP_S - 60
    client = Client(listed=[
        {"Id": "left", "Created": old, "RepoTags": ["<none>:<none>"]},
        {"Id": "under way", "Created": now, "RepoTags": None},
        {"Id": "kept", "Created": old, "RepoTags": ["mine:1"]},
    ])  # fmt: skip
    assert engine(client, monkeypatch).sweep() == 1
    assert client.images.removed == ["left"]
