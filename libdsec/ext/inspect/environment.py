"""Inspect's ``SandboxEnvironment`` on dsec.

Owns: the provider's calls and their contract: argv without a shell, separate verbatim
streams, limits read when the call is made, nothing injected before the command. Does
not own: words for results (:mod:`outcomes`), the connection (:mod:`session`).
"""

from __future__ import annotations

import asyncio
import posixpath
import shlex
from typing import Any, Literal, overload

from inspect_ai.util import (
    ExecResult,
    OutputLimitExceededError,
    SandboxConnection,
    SandboxEnvironment,
    SandboxEnvironmentLimits,
    sandboxenv,
)

from libdsec.errors import DSecError
from libdsec.ext.inspect import outcomes
from libdsec.ext.inspect.config import ConfigError, DSecSandboxConfig, load, variables_in
from libdsec.ext.inspect.session import STOPPED, session, stop_left_behind, working_directory
from libdsec.sandbox import Sandbox

CONFIG_FILES = ["dsec.yaml", "dsec.yml"]
POLLING_INTERVAL_S = 0.2
"""A command costs about a millisecond, so Inspect's services may ask often."""


@sandboxenv(name="dsec")
class DSecSandboxEnvironment(SandboxEnvironment):
    """One sandbox of a sample. Paths and ``cwd`` may be relative to its working
    directory. A command is never run twice, so ``timeout_retry`` changes nothing."""

    def __init__(self, sandbox: Sandbox, workdir: str) -> None:
        super().__init__()
        self.sandbox = sandbox
        self.workdir = workdir

    # -- an evaluation's life ----------------------------------------------------

    @classmethod
    async def task_init(cls, task_name: str, config: Any) -> None:
        """Connects, and refuses a configuration or an image that is not there before
        any sample begins."""
        try:
            asyncio.get_running_loop()
        except RuntimeError as exc:
            raise ConfigError("the dsec sandbox needs Inspect's asyncio backend") from exc
        current = session()
        missing = await current.missing_images(load(config))
        if missing:
            raise ConfigError(f"no such image in dsec: {', '.join(missing)}")
        current.begin_task()

    @classmethod
    async def task_init_environment(cls, config: Any, metadata: dict[str, str]) -> dict[str, str]:
        """The metadata that this sample's configuration mentions: each such sample's
        image is looked for at the start."""
        return variables_in(config, metadata)

    @classmethod
    async def sample_init(
        cls, task_name: str, config: Any, metadata: dict[str, str]
    ) -> dict[str, SandboxEnvironment]:
        """A sample's sandboxes, the default one first."""
        found = load(config, metadata)
        current = session()
        sandboxes = await current.create(found, task_name)
        try:
            named = found.named()
            return {
                name: cls(sandbox, await working_directory(sandbox, named[name].workdir))
                for name, sandbox in sandboxes.items()
            }
        except BaseException:
            await current.stop(sandboxes.values())
            raise

    @classmethod
    async def sample_cleanup(
        cls,
        task_name: str,
        config: Any,
        environments: dict[str, SandboxEnvironment],
        interrupted: bool,
    ) -> None:
        """Stops a sample's sandboxes, also when it was interrupted."""
        mine = [e.as_type(DSecSandboxEnvironment).sandbox for e in environments.values()]
        await session().stop(mine)

    @classmethod
    async def task_cleanup(cls, task_name: str, config: Any, cleanup: bool) -> None:
        """Stops what is left and disconnects; without ``cleanup`` names what goes on."""
        left = await session().end_task(cleanup=cleanup)
        if left:
            print("\ndsec sandboxes that go on:", *left, sep="\n  ")
            print("stop them all: inspect sandbox cleanup dsec\none: dsec stop <id>\n")

    @classmethod
    async def cli_cleanup(cls, id: str | None) -> None:
        """``inspect sandbox cleanup dsec [id]``: stops what evaluations left behind."""
        outcomes_ = await stop_left_behind(id)
        for uid, outcome in outcomes_.items():
            print(f"{uid}: {outcome}")
        if not outcomes_:
            print("no dsec sandbox of an evaluation is left")

    @classmethod
    def config_files(cls) -> list[str]:
        """What is looked for beside the task when ``sandbox="dsec"`` names no file."""
        return list(CONFIG_FILES)

    @classmethod
    def config_deserialize(cls, config: dict[str, Any]) -> DSecSandboxConfig:
        """The model of what a log kept."""
        return DSecSandboxConfig.model_validate(config)

    @classmethod
    def default_concurrency(cls) -> int | None:
        """No bound of ours: the service has quotas and waits for room."""
        return None

    def default_polling_interval(self) -> float:
        """Seconds between two looks of Inspect's services."""
        return POLLING_INTERVAL_S

    # -- commands and files ------------------------------------------------------

    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> ExecResult[str]:
        """Runs an argv; see Inspect's contract. After ``timeout`` seconds the whole
        tree is dead and ``TimeoutError`` carries the partial output. Output over the
        limit raises ``OutputLimitExceededError`` with its head and tail."""
        limit = SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE
        limit_text = SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE_STR
        try:
            ended = await self.sandbox.exec(
                list(cmd),
                stdin=input,
                cwd=self._path(cwd or ""),
                env=env,
                user=user,
                timeout=timeout,
                output_limit_bytes=limit,
            )
        except DSecError as exc:
            if outcomes.is_refusal(exc):
                return outcomes.refused(exc)
            raise outcomes.unavailable(exc) from exc
        return outcomes.exec_result(
            ended, shlex.join(cmd[:1]), timeout=timeout, limit_text=limit_text
        )

    async def write_file(self, file: str, contents: str | bytes) -> None:
        """Writes as the sandbox's user; parents are made, the file is replaced whole."""
        path = self._path(file)
        with outcomes.file_errors(path):
            await self.sandbox.files.write(path, contents)

    @overload
    async def read_file(self, file: str, text: Literal[True] = True) -> str: ...

    @overload
    async def read_file(self, file: str, text: Literal[False]) -> bytes: ...

    async def read_file(self, file: str, text: bool = True) -> str | bytes:
        """The content; line ends stay as they are. No more than the limit and one byte
        is fetched of a file that is over it."""
        path, limit = self._path(file), SandboxEnvironmentLimits.MAX_READ_FILE_SIZE
        with outcomes.file_errors(path):
            data = await self.sandbox.files.read(path, length=limit + 1)
        if len(data) > limit:
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR, None)
        return data.decode("utf-8") if text else data

    async def connection(self, *, user: str | None = None) -> SandboxConnection:
        """A shell of it. Raises ``ConnectionError`` when it does not run."""
        try:
            info = await self.sandbox.info()
        except DSecError as exc:
            raise ConnectionError(str(exc)) from exc
        if info.state in STOPPED:
            raise ConnectionError(f"sandbox {self.sandbox.id} is {info.state}")
        argv = ["dsec", "shell", self.sandbox.id, *(["--user", user] if user else [])]
        return SandboxConnection(type="dsec", command=shlex.join(argv), container=self.sandbox.id)

    def _path(self, path: str) -> str:
        return posixpath.join(self.workdir, path) if path else self.workdir
