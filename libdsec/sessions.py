"""Sessions: shells of a sandbox that live on between commands.

Owns: running and interrupting in one. Does not own: the shell, which is the sandbox's;
two objects of the same name are the same session.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from libdsec._command import command_request
from libdsec._wire import INLINE_BYTES
from libdsec.args import Seconds
from libdsec.process import OnOutput, checked
from libdsec.results import ExecResult

if TYPE_CHECKING:
    from libdsec.sandbox import Sandbox

OUTPUT_LIMIT_BYTES = 10 * 1024 * 1024
END_S = 10.0
"""How long a shell that is closed may take for its own end (its ``trap … EXIT``)."""


class Session:
    """A shell that keeps its directory, variables, functions, options, traps, open files
    and background jobs from one command to the next. Commands run one after the other;
    other sessions and :meth:`Sandbox.exec` are not waited for. The first command starts
    the shell (bash where the image has it, else sh; no start-up files), with the user,
    directory and variables given to :meth:`Sandbox.session`. ``async with`` ends it."""

    def __init__(
        self,
        sandbox: Sandbox,
        name: str,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> None:
        self._sandbox = sandbox
        self._start: dict[str, Any] = {"session": name, "cwd": cwd, "env": env, "user": user}
        self.name = name

    def __repr__(self) -> str:
        return f"Session({self.name!r} of {self._sandbox!r})"

    async def run(
        self,
        cmd: str,
        *,
        timeout: Seconds | None = None,
        idle_timeout: Seconds | None = None,
        check: bool = False,
        on_output: OnOutput | None = None,
        output_limit_bytes: int = OUTPUT_LIMIT_BYTES,
        merge: bool = False,
        op_id: str | None = None,
    ) -> ExecResult:
        """Runs a command when its turn has come. ``timeout`` in seconds, from then on,
        ends the command with everything it started; the shell and its state stay where it
        lets go (``session_ended`` says that it did not); ``idle_timeout`` does after so
        long without output. The command has no input.
        ``check`` raises ``ExecFailed`` or ``ExecTimeout``; ``merge`` sends stderr into
        stdout. The same ``op_id`` never runs twice."""
        request = command_request(
            (cmd,),
            timeout=timeout,
            idle_timeout=idle_timeout,
            output_limit_bytes=output_limit_bytes,
            merge=merge,
            stream=on_output is not None or output_limit_bytes > INLINE_BYTES,
            op_id=op_id,
            **self._start,
        )
        result = await self._sandbox._run(request, on_output=on_output)
        return checked(result, cmd) if check else result

    async def interrupt(self) -> bool:
        """As Ctrl-C: what the running command started gets SIGINT, and the shell leaves
        the command's text as soon as what it waits for has ended; the result has exit
        code 130. The shell and its state stay. Of commands begun by this sandbox object:
        ``False`` where none runs."""
        for operation in list(self._sandbox._turns.get(self.name, ())):
            if not operation.done:
                await operation.signal("INT")
                return True
        return False

    async def close(self) -> None:
        """Kills the commands that this sandbox object runs in it, and ends the shell with
        its background jobs. The next command of this name gets a fresh one. Idempotent."""
        for operation in list(self._sandbox._turns.get(self.name, ())):
            await operation.cancel()
        await self.run("exit 0", timeout=END_S)

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.close()
