"""An import that cannot be registered is answered; one that the database missed comes again."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from schemas.base import decode
from schemas.image import ImageCommand, ImageCreate, ImageReply
from schemas.sandbox import ImageConfig
from services.imagesvc import handlers, leases, store
from services.imagesvc.handlers import Handlers
from services.imagesvc.tasks import Task
from shared.errors import Unavailable

DIGEST = "a" * 64


class Nothing:
    """A database, an importer and a store that take all."""

    def __init__(self) -> None:
        self.discarded: list[str] = []

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[Nothing]:
        yield self

    async def run(self, _request: Any, *, progress: Any, keep: Any) -> Any:
        await keep([SimpleNamespace(digest=DIGEST)])
        return SimpleNamespace(config=ImageConfig(), stored=[])

    async def discard(self, digests: list[str]) -> None:
        self.discarded += digests


@pytest.fixture
def failure(monkeypatch: pytest.MonkeyPatch) -> list[Exception]:
    """What registering raises; nothing else is done."""
    errors: list[Exception] = []

    async def nothing(*_: Any, **__: Any) -> dict[Any, Any]:
        return {}

    async def fails(*_: Any, **__: Any) -> None:
        raise errors[0]

    async def fresh(*_: Any, **__: Any) -> list[str]:
        return [DIGEST]

    monkeypatch.setattr(store, "images", nothing)
    monkeypatch.setattr(store, "answer", nothing)
    monkeypatch.setattr(leases, "take", fresh)
    monkeypatch.setattr(leases, "give_back", nothing)
    monkeypatch.setattr(store, "register", fails)
    return errors


def made(nothing: Any, folder: Path) -> tuple[Handlers, Task, ImageCreate]:
    settings: Any = SimpleNamespace(
        image_allowed=handlers.intake.Allowed(str(folder)), progress_s=60.0, image_lease_s=60.0
    )
    create = ImageCreate(request_id="r", name="x", path=str(folder))
    command = ImageCommand(project="team", principal="p", create=create)
    message: Any = SimpleNamespace(reply_to=None)
    handler = Handlers(
        settings, nothing, nothing, importer=nothing, uploads=nothing, snapshots=nothing,
        discard=nothing.discard,
    )  # fmt: skip
    return handler, Task(command, message), create


async def test_an_image_that_no_row_takes_is_answered(
    failure: list[Exception], tmp_path: Path
) -> None:
    nothing = Nothing()
    failure.append(ValueError("22P05"))
    handler, task, create = made(nothing, tmp_path)
    reply = decode(await handler._create(task, create), ImageReply)
    assert reply.error is not None
    assert reply.error.code == "internal"
    assert nothing.discarded == [DIGEST]


async def test_an_image_that_the_database_missed_comes_again(
    failure: list[Exception], tmp_path: Path
) -> None:
    nothing = Nothing()
    failure.append(Unavailable("database: away"))
    handler, task, create = made(nothing, tmp_path)
    with pytest.raises(Unavailable):
        await handler._create(task, create)
    assert nothing.discarded == []


async def test_a_failed_import_discards_no_layer_that_was_known(
    failure: list[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def known(*_: Any, **__: Any) -> list[str]:
        return []

    monkeypatch.setattr(leases, "take", known)
    nothing = Nothing()
    failure.append(ValueError("22P05"))
    handler, task, create = made(nothing, tmp_path)
    await handler._create(task, create)
    assert nothing.discarded == []
