"""Images of registries: what comes is checked, what breaks off goes on, what fails leaves
nothing."""

from __future__ import annotations

import base64
import gzip
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zstandard

from services.imagesvc.importer import Importer, ImportResult
from services.imagesvc.names import parse_registry
from services.imagesvc.registry import ATTEMPTS, Registries
from services.imagesvc.sources import ImportRequest, RegistrySource
from shared.blobs.folder import FolderStore
from shared.errors import DsecError, Forbidden, InvalidRequest, NotFound, Unavailable, Unsupported
from tests.integration.imagesvc.seen import mounted
from tests.registry import ACCOUNT, OCI, Registry
from tests.unit.services.imagesvc.tars import image_config, member, sha256, tar_bytes

BIG = os.urandom(3 << 20)
LAYERS = [tar_bytes([member("big", BIG)]), tar_bytes([member("b", b"2")])]
PACKED = [
    (gzip.compress(LAYERS[0], 1), f"{OCI}.layer.v1.tar+gzip"),
    (zstandard.compress(LAYERS[1]), f"{OCI}.layer.v1.tar+zstd"),
]


@pytest.fixture
def registry() -> Iterator[Registry]:
    made = Registry()
    made.image(PACKED, image_config(LAYERS, Env=["A=b"]), "1")
    with made.serving():
        yield made


@pytest.fixture
def accounts(registry: Registry, tmp_path: Path) -> Path:
    path = tmp_path / "accounts.json"
    auth = base64.b64encode(ACCOUNT.encode()).decode()
    path.write_text(json.dumps({"auths": {registry.host: {"auth": auth}}}))
    return path


def pull(
    registry: Registry, store: FolderStore, name: str = "repo:1", accounts: Path | None = None
) -> ImportResult:
    importer = Importer(store, registries=Registries(accounts=accounts, backoff_s=0.001))
    source = RegistrySource(parse_registry(f"{registry.host}/{name}"), plain_http=True)
    try:
        return importer.run_blocking(ImportRequest(source))
    finally:
        importer.close()


def refused(registry: Registry, store: FolderStore, **fields: Any) -> DsecError:
    with pytest.raises(DsecError) as caught:
        pull(registry, store, **fields)
    left = [path for part in ("layers", "tmp") for path in (store.root / part).iterdir()]
    assert left == []
    assert caught.value.field == "registry"
    return caught.value


def test_compressed_layers_arrive_as_they_were(registry: Registry, store: FolderStore) -> None:
    result = pull(registry, store)
    assert result.config.env == {"A": "b"}
    with mounted(store, result.layers) as root:
        assert Path(f"/proc/self/fd/{root}/big").read_bytes() == BIG
        assert Path(f"/proc/self/fd/{root}/b").read_bytes() == b"2"
    digest = next(key for key in registry.manifests if key.startswith("sha256:"))
    assert pull(registry, store, f"repo@{digest}").layers == result.layers


@pytest.mark.parametrize("auth", ["basic", "token"])
def test_a_password_or_token_opens_the_registry(
    registry: Registry, store: FolderStore, accounts: Path, auth: Any
) -> None:
    registry.auth = auth
    assert isinstance(refused(registry, store), Forbidden)
    assert pull(registry, store, accounts=accounts).layers


def test_the_image_of_this_machines_platform_is_chosen(
    registry: Registry, store: FolderStore
) -> None:
    def entry(layer: bytes, **platform: str) -> dict[str, Any]:
        made = registry.image([(layer, f"{OCI}.layer.v1.tar")], image_config([layer]))
        return made | {"platform": platform}

    own, other = tar_bytes([member("own", b"1")]), tar_bytes([member("other", b"1")])
    index = {
        "schemaVersion": 2,
        "manifests": [
            entry(other, os="linux", architecture="s390x"),
            entry(other, os="unknown", architecture="unknown"),
            entry(own, os="linux", architecture="amd64"),
            entry(other, os="linux", architecture="amd64", variant="v3"),
            entry(own, os="linux", architecture="arm64", variant="v8"),
        ],
    }
    registry.manifest(index, f"{OCI}.index.v1+json", "many")
    with mounted(store, pull(registry, store, "repo:many").layers) as root:
        assert os.listdir(root) == ["own"]
    index["manifests"] = index["manifests"][:1]
    registry.manifest(index, f"{OCI}.index.v1+json", "foreign")
    error = refused(registry, store := FolderStore(store.root / "other"), name="repo:foreign")
    assert isinstance(error, Unsupported)
    assert "s390x" in error.message


@pytest.mark.parametrize("ranges", [True, False])
def test_a_blob_that_breaks_off_goes_on(
    registry: Registry, store: FolderStore, ranges: bool
) -> None:
    registry.cut_at, registry.cuts, registry.ranges = 1 << 20, 2, ranges
    registry.busy = 2
    with mounted(store, pull(registry, store).layers) as root:
        assert Path(f"/proc/self/fd/{root}/big").read_bytes() == BIG
    asked = [start for path, start in registry.log if "/blobs/" in path and start]
    assert asked[0] == f"bytes={1 << 20}-"


def test_a_registry_that_fails_half_way_leaves_nothing(
    registry: Registry, store: FolderStore
) -> None:
    registry.cut_at, registry.cuts = 0, 1000
    error = refused(registry, store)
    assert isinstance(error, Unavailable)
    assert error.retryable
    assert len(registry.log) <= 3 * ATTEMPTS
    registry.cuts, registry.busy = 0, 1000
    assert isinstance(refused(registry, store), Unavailable)


def test_wrong_bytes_are_refused(registry: Registry, store: FolderStore) -> None:
    digest = f"sha256:{sha256(PACKED[1][0])}"
    registry.blobs[digest] = bytes(len(registry.blobs[digest]))
    error = refused(registry, store)
    assert isinstance(error, InvalidRequest)
    assert "digest mismatch" in error.message
    registry.blobs[digest] = b"x" * 10_000
    assert "more than" in refused(registry, store).message
    named = next(key for key in registry.manifests if key.startswith("sha256:"))
    registry.manifests[named] = (f"{OCI}.manifest.v1+json", b"{}")
    assert "digest mismatch" in refused(registry, store, name=f"repo@{named}").message


def test_what_is_not_understood_is_named(registry: Registry, store: FolderStore) -> None:
    layer = LAYERS[1]
    registry.image([(layer, "application/x-secret")], image_config([layer]), "layer")
    error = refused(registry, store, name="repo:layer")
    assert isinstance(error, Unsupported)
    assert "application/x-secret" in error.message
    registry.manifest({}, "application/vnd.docker.distribution.manifest.v1+prettyjws", "old")
    assert isinstance(refused(registry, store, name="repo:old"), Unsupported)
    registry.manifests["text"] = ("text/plain", b"hello")
    assert isinstance(refused(registry, store, name="repo:text"), DsecError)
    assert isinstance(refused(registry, store, name="repo:none"), NotFound)


def test_a_registry_that_is_not_there_is_unavailable(store: FolderStore) -> None:
    gone = Registry()
    with gone.serving():
        pass
    assert isinstance(refused(gone, store), Unavailable)
