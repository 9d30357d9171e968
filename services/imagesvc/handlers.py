"""What imagesvc does with messages: imports, deletions, questions.

Owns: the order of steps of each, answers and progress, idempotency by request id.
Does not own: SQL (``store``), imports (``importer``), rules (``environments``,
``intake``).

A request is carried out once: its answer is stored with its effect and sent again
when the message comes again. An import whose process dies is begun anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial

from schemas.base import encode
from schemas.image import (
    ImageChanged,
    ImageCreate,
    ImageDelete,
    ImageQuery,
    ImageReply,
    ImageTag,
    Kind,
    ResolveReply,
    ResolveRequest,
    SnapshotCreate,
)
from schemas.subjects import evt
from services.imagesvc import environments, intake, leases, snapshots, store
from services.imagesvc.importer import Importer, ImportResult
from services.imagesvc.meter import ImportProgress
from services.imagesvc.names import ImageName, parse_name
from services.imagesvc.settings import Settings
from services.imagesvc.snapshots import Snapshots
from services.imagesvc.tasks import (
    Image,
    Reporter,
    Task,
    answered_with,
    read_command,
    refused,
    share,
)
from services.imagesvc.uploads import Uploads
from shared import telemetry
from shared.blobs.layout import LayerFiles, LayerManifest
from shared.bus import Bus, Incoming, Outgoing
from shared.consumer import Received
from shared.db import Database
from shared.errors import Conflict, DsecError, Internal, InvalidRequest, NotFound, Unavailable

log = logging.getLogger(__name__)

KEEP_ALIVE_S = 10.0
"""A third of the durable's acknowledgement wait."""
ALIVE_S = 5.0
"""Between two signs that a snapshot is under way."""
PACKING = ImportProgress("writing", 0, 0)


class Handlers:
    """The handlers of ``imagesvc_commands`` and of questions to imagesvc."""

    def __init__(
        self, settings: Settings, bus: Bus, db: Database, *, importer: Importer, uploads: Uploads,
        snapshots: Snapshots, discard: Callable[[list[str]], Awaitable[None]],
    ) -> None:  # fmt: skip
        self._settings = settings
        self._snapshots = snapshots
        self._bus = bus
        self._db = db
        self._importer = importer
        self._uploads = uploads
        self._discard = discard
        self.busy = 0
        """Commands being carried out; an import may take minutes."""

    async def commands(self, batch: Sequence[Received]) -> None:
        """Carries out a batch side by side; returns when all are answered.

        Raises ``Unavailable`` where the database is away: then all come again.
        """
        tasks = [Task(read_command(message), message) for message in batch]
        async with self._kept_alive(batch), asyncio.TaskGroup() as group:
            running = [group.create_task(self._guarded(task)) for task in tasks]
        for done in running:
            if (error := done.result()) is not None:
                raise error

    async def _guarded(self, task: Task) -> Exception | None:
        """An exception as a value, so that one message does not cancel the others."""
        try:
            with telemetry.span("image command", parents=[task.message.trace]):
                await self._carry_out(task)
        except Exception as error:
            return error
        return None

    @contextlib.asynccontextmanager
    async def _kept_alive(self, batch: Sequence[Received]) -> AsyncIterator[None]:
        async def tell() -> None:
            while True:
                await asyncio.sleep(KEEP_ALIVE_S)
                for message in batch:
                    await message.in_progress()

        telling = asyncio.create_task(tell(), name="image commands in progress")
        self.busy += len(batch)
        try:
            yield
        except asyncio.CancelledError:
            for message in batch:  # so that another begins at once
                await message.msg.nak()
            raise
        finally:
            self.busy -= len(batch)
            telling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await telling

    async def _carry_out(self, task: Task) -> None:
        project = task.command.project
        async with self._db.transaction() as connection:
            known = await store.answered(connection, project, task.request_id)
        if known is not None:
            reply = known[1] if known[0] == task.sha256 else self._conflict(task)
        elif task.command.create is not None:
            reply = await self._create(task, task.command.create)
            await self._tell_changed(project, task.command.create.name)
        elif task.command.snapshot is not None:
            reply = await self._snapshot(task, task.command.snapshot)
            if task.command.snapshot.name is not None:
                await self._tell_changed(project, task.command.snapshot.name)
        elif task.command.delete is not None:
            reply = await self._delete(task, task.command.delete)
            await self._tell_changed(project, task.command.delete.name)
        elif task.command.tag is not None:
            reply = await self._tag(task, task.command.tag)
            await self._tell_changed(project, task.command.tag.target)
        else:  # refused when it was read
            return
        await self._send(task.reply_to, reply)

    async def _tell_changed(self, project: str, name: str) -> None:
        """Schedulers forget the name before the client is told: a word that is lost
        costs them a stale answer for as long as they cache."""
        changed = ImageChanged(project=project, name=name)
        try:
            await self._bus.send(Outgoing(evt("imagesvc", "image", project), encode(changed)))
        except DsecError as error:
            log.debug("a change was not told: %s", error.message)

    def _conflict(self, task: Task) -> bytes:
        error = Conflict("this request id was used for something else", field="request_id")
        return refused(task, error)

    async def _create(self, task: Task, create: ImageCreate) -> bytes:
        fresh: list[str] = []
        image: Image | None = None
        try:
            name = parse_name(create.name)
            result = await self._import(task, create, fresh)
            image = Image(name, create.kind, create.config or result.config, result.stored)
            reply, done = await self._register(task, image), True
        except Exception as error:
            if _again(error, image):
                raise
            await self._undo(task, fresh)
            reply = await self._failed(task, error, f"import of {create.name}")
            done = isinstance(error, DsecError) and not error.retryable
        if create.upload is not None and done:
            await asyncio.to_thread(self._uploads.drop, task.owner, create.upload.id)
        return reply

    async def _import(
        self, task: Task, create: ImageCreate, fresh: list[str]
    ) -> ImportResult:
        uploaded = None
        if create.upload is not None:
            uploaded = await asyncio.to_thread(self._uploads.checked, task.owner, create.upload)
        request = intake.import_request(create, self._settings.image_allowed, uploaded=uploaded)

        async def keep(layers: Sequence[LayerFiles]) -> None:
            # those of others are theirs to use, named or not
            fresh.extend(await self._lease(task.request_id, layers))

        async with self._reported(task) as report:
            return await self._importer.run(request, progress=report, keep=keep)

    async def _snapshot(self, task: Task, asked: SnapshotCreate) -> bytes:
        image: Image | None = None
        try:
            name = snapshots.name_of(asked)
            async with self._reported(task, every_s=ALIVE_S, steady=PACKING):
                keep = partial(self.lease, task.request_id)
                made = await self._snapshots.take(task.command, asked, keep)
            kind: Kind = "snapshot" if asked.name is None else "base"
            image = Image(name, kind, made.config, made.layers, made.provenance)
            return await self._register(task, image)
        except Exception as error:
            if _again(error, image):
                raise
            return await self._failed(task, error, f"snapshot of {asked.uid}")

    async def _failed(self, task: Task, error: Exception, what: str) -> bytes:
        if isinstance(error, DsecError):
            # what failed for want of room or an engine may be asked for again
            return await self._answer(task, refused(task, error), keep=not error.retryable)
        log.error("%s failed", what, exc_info=error)
        internal = Internal(f"{type(error).__name__} in the {what}")
        return await self._answer(task, refused(task, internal), keep=False)

    async def lease(self, holder: str, layers: Sequence[LayerFiles | LayerManifest]) -> None:
        """Keeps ``layers`` from collection until :meth:`give_back`."""
        await self._lease(holder, layers)

    async def _lease(
        self, holder: str, layers: Sequence[LayerFiles | LayerManifest]
    ) -> list[str]:
        async with self._db.transaction() as connection:
            return await leases.take(
                connection, layers, holder=holder, seconds=self._settings.image_lease_s
            )

    async def give_back(self, holder: str) -> None:
        """Ends a lease."""
        async with self._db.transaction() as connection:
            await leases.give_back(connection, holder)

    async def _undo(self, task: Task, fresh: list[str]) -> None:
        """Leaves nothing of an import that failed after its layers began to be stored, but
        what was there before it; what cannot be removed now is collected."""
        try:
            await self.give_back(task.request_id)
            if fresh:
                await self._discard(fresh)
        except DsecError as error:
            log.warning("layers of a failed import stay for now: %s", error.message)

    async def _register(self, task: Task, image: Image) -> bytes:
        key = (task.command.project, image.name)
        async with self._db.transaction() as connection:
            before = (await store.images(connection, [key])).get(key)
            if before is not None and before.kind != image.kind:
                reply = refused(task, Conflict(f"{image.name} is a {before.kind}", field="kind"))
            else:
                await store.register(
                    connection, key, kind=image.kind, config=image.config, layers=image.layers,
                    principal=task.command.principal, provenance=image.provenance,
                )  # fmt: skip
                reply = answered_with(task, (await store.images(connection, [key]))[key])
            await leases.give_back(connection, task.request_id)
            await store.answer(connection, key[0], task.request_id, sha256=task.sha256, reply=reply)
        return reply

    async def _tag(self, task: Task, tag: ImageTag) -> bytes:
        try:
            name, target = parse_name(tag.name), parse_name(tag.target, field="target")
            return await self._point(task, name, target)
        except (InvalidRequest, NotFound, Conflict) as error:
            return await self._answer(task, refused(task, error))

    async def _point(self, task: Task, name: ImageName, target: ImageName) -> bytes:
        project = task.command.project
        keys = [(project, name), (project, target)]
        async with self._db.transaction() as connection:
            found = await store.images(connection, keys)
            source, before = (found.get(key) for key in keys)
            if source is None:
                raise NotFound(f"no image {name} in project {project}", field="name")
            if before is not None and before.kind != source.kind:
                raise Conflict(f"{target} is a {before.kind}", field="target")
            await store.copy(connection, *keys, principal=task.command.principal)
            made = (await store.images(connection, keys))[keys[1]]
            reply = answered_with(task, made)
            await store.answer(
                connection, project, task.request_id, sha256=task.sha256, reply=reply
            )
        return reply

    async def _delete(self, task: Task, delete: ImageDelete) -> bytes:
        project = task.command.project
        try:
            name = parse_name(delete.name)
        except InvalidRequest as error:
            return await self._answer(task, refused(task, error))
        async with self._db.transaction() as connection:
            gone = await store.remove(connection, (project, name))
            missing = NotFound(f"no image {name} in project {project}", field="name")
            reply = answered_with(task) if gone else refused(task, missing)
            await store.answer(
                connection, project, task.request_id, sha256=task.sha256, reply=reply
            )
        return reply

    async def _answer(self, task: Task, reply: bytes, *, keep: bool = True) -> bytes:
        if keep:
            async with self._db.transaction() as connection:
                await store.answer(
                    connection, task.command.project, task.request_id, sha256=task.sha256,
                    reply=reply,
                )  # fmt: skip
        return reply

    @contextlib.asynccontextmanager
    async def _reported(
        self, task: Task, *, every_s: float | None = None, steady: ImportProgress | None = None
    ) -> AsyncIterator[Reporter]:
        """A sink for progress whose latest state is sent now and then; ``steady`` is sent
        where there is no other."""
        reporter = Reporter()
        every_s = every_s or self._settings.progress_s
        telling = asyncio.create_task(
            self._tell(task, reporter, every_s, steady), name="image progress"
        )
        try:
            yield reporter
        finally:
            telling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await telling

    async def _tell(
        self, task: Task, reporter: Reporter, every_s: float, steady: ImportProgress | None
    ) -> None:
        while True:
            await asyncio.sleep(every_s)
            state, reporter.state = reporter.state or steady, None
            if state is not None:
                reply = ImageReply(
                    request_id=task.request_id, progress=share(state), stage=state.stage
                )
                await self._send(task.reply_to, encode(reply))

    async def _send(self, reply_to: str | None, reply: bytes) -> None:
        """At most once: a lost answer is healed by asking for the image."""
        if reply_to is None:
            return
        try:
            await self._bus.send(Outgoing(reply_to, reply))
        except DsecError as error:
            log.debug("an answer was not sent: %s", error.message)

    async def resolve(self, request: ResolveRequest, _: Incoming) -> ResolveReply:
        """Names to layers, for a batch of environments in one query."""
        names_max = self._settings.image_names_max
        async with self._db.transaction() as connection:
            found = await store.images(
                connection, environments.wanted(request.items, names_max=names_max)
            )
        return ResolveReply(
            items=[environments.resolve(i, found, names_max=names_max) for i in request.items]
        )

    async def images(self, query: ImageQuery, _: Incoming) -> ImageReply:
        """The images a project sees, or the one it sees by a name."""
        if query.name is not None:
            name = parse_name(query.name)
            async with self._db.transaction() as connection:
                found = await store.images(connection, [(p, name) for p in query.projects])
            return ImageReply(image=environments.nearest(name, query.projects, found, field="name"))
        async with self._db.transaction() as connection:
            images = await store.in_projects(
                connection, query.projects, kind=query.kind, limit=self._settings.image_list_max
            )
        return ImageReply(images=environments.visible(images, query.projects))


def _again(error: Exception, image: Image | None) -> bool:
    """Whether only the database is away for an ``image`` that is made: the command comes
    again. Anything else will not be better then, and is answered."""
    return image is not None and isinstance(error, Unavailable)
