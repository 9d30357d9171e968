"""The port's ``Files`` for sandboxes with an agent.

Owns: nothing but the delegation. Does not own: the operations
(:mod:`services.edge.agent.files`). A user that is not given is the sandbox's own.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from services.edge.agent import files
from services.edge.drivers.base import FileInfo, Handle

if TYPE_CHECKING:
    from services.edge.agent.client import AgentClient


class FilesOfAgent:
    """Mixed into a driver that knows the agent and the default user of a handle."""

    def _agent(self, handle: Handle) -> tuple[AgentClient, str]:
        raise NotImplementedError

    def read(
        self, handle: Handle, path: str, *, user: str | None, offset: int = 0,
        length: int | None = None,
    ) -> AsyncIterator[bytes]:  # fmt: skip
        agent, default = self._agent(handle)
        return files.read(agent, path, user=user or default, offset=offset, length=length)

    async def write(
        self, handle: Handle, path: str, chunks: AsyncIterator[bytes], *, user: str | None,
        mode: int | None = None, append: bool = False,
    ) -> FileInfo:  # fmt: skip
        agent, default = self._agent(handle)
        return await files.write(
            agent, path, chunks, user=user or default, mode=mode, append=append
        )

    async def stat(self, handle: Handle, path: str, *, user: str | None) -> FileInfo:
        agent, default = self._agent(handle)
        return await files.stat(agent, path, user=user or default)

    async def list(self, handle: Handle, path: str, *, user: str | None) -> list[FileInfo]:
        agent, default = self._agent(handle)
        return await files.list_dir(agent, path, user=user or default)

    async def mkdir(
        self, handle: Handle, path: str, *, user: str | None, mode: int = 0o755,
        parents: bool = True,
    ) -> None:  # fmt: skip
        agent, default = self._agent(handle)
        await files.mkdir(agent, path, user=user or default, mode=mode, parents=parents)

    async def remove(
        self, handle: Handle, path: str, *, user: str | None, recursive: bool = False
    ) -> None:
        agent, default = self._agent(handle)
        await files.remove(agent, path, user=user or default, recursive=recursive)

    async def move(self, handle: Handle, src: str, dst: str, *, user: str | None) -> None:
        agent, default = self._agent(handle)
        await files.move(agent, src, dst, user=user or default)
