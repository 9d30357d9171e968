"""The port's ``Files`` and ``FileTrees`` for sandboxes with an agent.

Owns: what a call leaves out: the sandbox's user, where relative paths begin. Does not
own: the operations (:mod:`services.edge.agent.files`).
"""

from __future__ import annotations

import posixpath
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING

from services.edge.agent import files
from services.edge.drivers.base import Handle, ResumeIO
from services.edge.drivers.container.limiting import limit_told
from services.edge.drivers.files import FileChange, FileInfo

if TYPE_CHECKING:
    from services.edge.agent.client import AgentClient
    from services.edge.agent.commands import Defaults


class FilesOfAgent:
    """Mixed into a driver that knows the agent and the default user of a handle."""

    def _agent(self, handle: Handle) -> tuple[AgentClient, Defaults]:
        raise NotImplementedError

    def _call(self, handle: Handle, path: str, user: str | None) -> tuple[AgentClient, str, str]:
        """The agent, the absolute path and the user of a call."""
        agent, defaults = self._agent(handle)
        if not path.startswith("/"):  # `..` is the sandbox's to resolve, over links too
            parts = [part for part in path.split("/") if part != "."]
            path = posixpath.join(defaults.cwd, *parts)
        return agent, path, user or defaults.user

    def read(
        self, handle: Handle, path: str, *, user: str | None, offset: int = 0,
        length: int | None = None, source: str | None = None,
        opened: Callable[[str], None] | None = None,
    ) -> AsyncIterator[bytes]:  # fmt: skip
        agent, path, user = self._call(handle, path, user)
        return files.read(
            agent, path, user=user, offset=offset, length=length, source=source, opened=opened
        )

    async def write(
        self, handle: Handle, path: str, chunks: AsyncIterator[bytes], *, user: str | None,
        mode: int | None = None, append: bool = False, mtime_ns: int | None = None,
        sparse: bool = False, key: str | None = None,
    ) -> FileInfo:  # fmt: skip
        agent, path, user = self._call(handle, path, user)
        with limit_told(handle):
            return await files.write(
                agent, path, chunks, user=user, mode=mode, append=append,
                mtime_ns=mtime_ns, sparse=sparse, key=key,
            )  # fmt: skip

    async def stat(self, handle: Handle, path: str, *, user: str | None) -> FileInfo:
        agent, path, user = self._call(handle, path, user)
        return await files.stat(agent, path, user=user)

    def list(
        self, handle: Handle, path: str, *, user: str | None, recursive: bool = False
    ) -> AsyncIterator[list[FileInfo]]:
        agent, path, user = self._call(handle, path, user)
        return files.list_dir(agent, path, user=user, recursive=recursive)

    async def mkdir(
        self, handle: Handle, path: str, *, user: str | None, mode: int = 0o755,
        parents: bool = True,
    ) -> None:  # fmt: skip
        agent, path, user = self._call(handle, path, user)
        with limit_told(handle):
            await files.mkdir(agent, path, user=user, mode=mode, parents=parents)

    async def remove(
        self, handle: Handle, path: str, *, user: str | None, recursive: bool = False
    ) -> None:
        agent, path, user = self._call(handle, path, user)
        await files.remove(agent, path, user=user, recursive=recursive)

    async def move(self, handle: Handle, src: str, dst: str, *, user: str | None) -> None:
        agent, src, user = self._call(handle, src, user)
        _, dst, _ = self._call(handle, dst, user)
        with limit_told(handle):
            await files.move(agent, src, dst, user=user)

    def pack(
        self, handle: Handle, path: str, names: bytes, *, user: str | None, contents: bool = True
    ) -> AsyncIterator[bytes]:
        agent, path, user = self._call(handle, path, user)
        return files.pack(agent, path, names, user=user, contents=contents)

    async def unpack(
        self, handle: Handle, path: str, chunks: AsyncIterator[bytes], *, user: str | None,
        key: str | None = None,
    ) -> FileInfo:  # fmt: skip
        agent, path, user = self._call(handle, path, user)
        with limit_told(handle):
            return await files.unpack(agent, path, chunks, user=user, key=key)

    def watch(
        self, handle: Handle, path: str, *, user: str | None, recursive: bool = True
    ) -> AsyncIterator[Sequence[FileChange]]:
        agent, path, user = self._call(handle, path, user)
        return files.watch(agent, path, user=user, recursive=recursive)

    async def resume_input(
        self, handle: Handle, key: str, io: ResumeIO, chunks: AsyncIterator[bytes]
    ) -> FileInfo | None:
        agent, _ = self._agent(handle)
        with limit_told(handle):
            return await files.resume_input(agent, key, io, chunks)
