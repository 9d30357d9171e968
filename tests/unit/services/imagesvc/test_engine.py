"""A container engine as a source: whose images are read, which are removed."""

from __future__ import annotations

import tarfile
import time
from pathlib import Path
from typing import IO, Any

import pytest
from docker.errors import ImageNotFound

from services.imagesvc.engine import (
    BUILT_KEEP_S,
    IGNORE_STARS_MAX,
    LABEL,
    DockerEngine,
    is_name_of,
)
from shared.errors import Forbidden, InvalidRequest, NotFound
from tests.unit.services.imagesvc.tars import member, symlink, tar_bytes

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
        self.sent, self.pulled = list[str](), list[str]()
        self.there: Image | None = None

    def get(self, reference: str) -> Image:
        if self.image is None:
            raise ImageNotFound("no such image")
        return self.image

    def images(self, *, filters: dict[str, str]) -> list[dict[str, Any]]:
        assert filters == {"label": LABEL}
        return self.listed

    def build(self, *, fileobj: IO[bytes], **options: Any) -> list[dict[str, Any]]:
        headers: dict[str, str] = {}
        self._set_auth_headers(headers)
        assert not headers
        with tarfile.open(fileobj=fileobj) as tar:
            self.sent = tar.getnames()
        return [{"aux": {"ID": ID}}]

    def _set_auth_headers(self, headers: dict[str, str]) -> None:
        headers["X-Registry-Config"] = "a password"

    def pull(self, repository: str, **options: Any) -> list[dict[str, Any]]:
        assert options["auth_config"] == {}
        self.pulled.append(repository)
        self.image = self.there
        return []

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


def built(
    client: Client, entries: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    **options: Any,
) -> str:  # fmt: skip
    context = tmp_path / "context.tar"
    context.write_bytes(tar_bytes(entries))
    made = DockerEngine(scratch=tmp_path, **options)
    monkeypatch.setattr(made, "_client", lambda timeout_s=None: client)
    return made.build(context, dockerfile="Dockerfile", target=None, tick=lambda done: None)


def dockerfile(text: str, name: str = "Dockerfile") -> Any:
    return member(name, text.encode())


def test_a_build_sends_its_context_and_no_credentials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Client(Image(["a:latest"], {}))
    assert built(client, [dockerfile("FROM a"), member("b", b"")], tmp_path, monkeypatch) == ID
    assert client.images.sent == ["Dockerfile", "b"]


@pytest.mark.parametrize("reference", ["abab", ID[7:19], "b", "other.host/a", f"b@{ID}"])
def test_a_build_begins_with_no_image_by_its_id_nor_from_any_host(
    reference: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Client(Image(["a:latest"], {}))
    for line in (f"FROM {reference}", f"FROM scratch\nCOPY --from={reference} /a /a"):
        with pytest.raises(Forbidden):
            built(client, [dockerfile(line)], tmp_path, monkeypatch, registries="a.host")
    assert not client.images.sent and not client.images.pulled


def test_a_build_takes_images_of_allowed_registries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Client()
    client.images.there = Image(["a.host/x:1"], {})
    built(client, [dockerfile("FROM a.host/x:1")], tmp_path, monkeypatch, registries="a.host")
    assert client.images.pulled == ["a.host/x"]


def test_an_image_with_steps_of_its_own_begins_no_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Client(Image(["a:latest"], {}))
    assert client.images.image is not None
    client.images.image.attrs["Config"] = {"OnBuild": ["ADD http://h/x /x"]}
    with pytest.raises(Forbidden):
        built(client, [dockerfile("FROM a")], tmp_path, monkeypatch)


@pytest.mark.parametrize(
    "entries",
    [
        [dockerfile("FROM scratch"), dockerfile("FROM other.host/x")],
        [dockerfile("FROM scratch"), dockerfile("FROM other.host/x", "b/../Dockerfile")],
        [dockerfile("FROM scratch"), symlink("b", "."), dockerfile("FROM c", "b/Dockerfile")],
        [dockerfile("FROM c", "b"), symlink("Dockerfile", "b")],
        [dockerfile("FROM scratch"), member(".dockerignore", b"*a" * (IGNORE_STARS_MAX + 1))],
        [dockerfile("FROM scratch"), member("b", bytes(5000))],
    ],
)
def test_a_context_that_shows_the_engine_another_one_is_refused(
    entries: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Client(Image(["c:latest"], {}))
    with pytest.raises(InvalidRequest):
        built(client, entries, tmp_path, monkeypatch, unpacked_bytes_max=4096)
    assert not client.images.sent
