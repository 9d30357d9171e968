"""What tests ask imagesvc with, over the bus."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nats.aio.client import Client

from devstack import Endpoints
from schemas.base import HEADER_REPLY, decode, encode
from schemas.image import (
    ImageCommand,
    ImageCreate,
    ImageDelete,
    ImageReply,
    ImageTag,
    ResolveItem,
    ResolveReply,
    ResolveRequest,
)
from schemas.subjects import cmd, rpc
from services.imagesvc.settings import Settings
from shared import ids
from shared.bus import unwrap

ANSWER_S = 60.0
PROJECT = "team"


@dataclass
class Stack:
    ends: Endpoints
    dsn: str
    client: Client
    folder: Path
    fields: dict[str, Any] = field(default_factory=dict)
    """Settings of the service beside those below."""

    def settings(self) -> Settings:
        return Settings(
            pg_dsn=self.dsn,
            nats_url=self.ends.nats_url,
            nats_user="imagesvc",
            nats_password=self.ends.nats_users["imagesvc"],
            image_roots=str(self.folder),
            progress_s=0.02,
            shutdown_s=5.0,
            image_scratch=f"{self.folder}/scratch",
            image_transfers=f"{self.folder}/transfers",
            **({"store_url": f"file://{self.folder}/store"} | self.fields),
        )

    async def ask(self, message: ImageCommand) -> tuple[ImageReply, list[ImageReply]]:
        """Stores a command; its answer and the progress told before it."""
        inbox = self.client.new_inbox()
        answers = await self.client.subscribe(inbox)
        await self.client.flush()
        verb = "create" if message.create else "delete" if message.delete else "tag"
        await self.client.jetstream(timeout=60).publish(
            cmd("image", verb, message.project), encode(message), headers={HEADER_REPLY: inbox}
        )
        told: list[ImageReply] = []
        while True:
            reply = decode((await answers.next_msg(ANSWER_S)).data, ImageReply)
            if reply.progress is None:
                await answers.unsubscribe()
                return reply, told
            told.append(reply)

    async def create(self, name: str, project: str = PROJECT, **fields: Any) -> ImageReply:
        fields.setdefault("request_id", ids.new())
        create = ImageCreate(name=name, **fields)
        reply, _ = await self.ask(ImageCommand(project=project, principal="p", create=create))
        return reply

    async def delete(self, name: str) -> ImageReply:
        delete = ImageDelete(request_id=ids.new(), name=name)
        reply, _ = await self.ask(ImageCommand(project=PROJECT, principal="p", delete=delete))
        return reply

    async def tag(self, name: str, target: str) -> ImageReply:
        tag = ImageTag(request_id=ids.new(), name=name, target=target)
        reply, _ = await self.ask(ImageCommand(project=PROJECT, principal="p", tag=tag))
        return reply

    async def ask_subject(self, subject: str, message: Any, type_: Any) -> Any:
        answer = await self.client.request(subject, encode(message), timeout=60)
        return unwrap(answer.data, type_)

    async def question(self, verb: str, message: Any, type_: Any) -> Any:
        return await self.ask_subject(rpc("imagesvc", verb), message, type_)

    async def resolve(self, *names: str, projects: tuple[str, ...] = (PROJECT,)) -> Any:
        request = ResolveRequest(items=[ResolveItem(names=list(names), projects=list(projects))])
        return (await self.question("resolve", request, ResolveReply)).items[0]

    def tree(self, name: str, content: bytes = b"x", size: int = 1) -> str:
        folder = self.folder / name
        folder.mkdir()
        (folder / "f").write_bytes(content * size)
        return str(folder)
