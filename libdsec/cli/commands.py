"""``dsec run``, ``exec`` and ``shell``."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer

from libdsec import DSecRunArgs, Sandbox
from libdsec.cli.common import Json, Labels, client, emit, exit_code, pairs, run
from libdsec.cli.policies import policy_of
from libdsec.cli.pump import pump, write_all
from libdsec.cli.terminal import interact, on_terminal

RAW = {"allow_interspersed_args": False}
"""Options end where the command begins: its own are its own."""



def _command(words: list[str] | None) -> list[str] | None:
    if words and words[0] == "--":
        return words[1:]
    if words and words[0].startswith("-"):
        raise typer.BadParameter(f"{words[0]} is no command: options come before all else")
    return words


Command = Annotated[
    list[str] | None,
    typer.Argument(metavar="[CMD]…", show_default=False, callback=_command),
]
Env = Annotated[list[str] | None, typer.Option("--env", "-e", metavar="KEY=VALUE")]
User = Annotated[str | None, typer.Option("--user", "-u")]
TimeLimit = Annotated[
    float | None, typer.Option("--timeout", "-t", help="Seconds until the command is killed.")
]
Stdin = Annotated[bool, typer.Option("--interactive", "-i", help="Pass our input on.")]


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    app.command("run", context_settings=RAW)(run_image)
    app.command("exec", context_settings=RAW)(execute)
    app.command("shell")(shell)


def run_image(
    image: Annotated[str, typer.Argument(help="Name of the image, or - with --layer.")],
    command: Command = None,
    backend: Annotated[str, typer.Option(help="container, microvm, vm or fake")] = "container",
    layer: Annotated[list[str] | None, typer.Option(help="Layers, bottom to top.")] = None,
    cpus: Annotated[float | None, typer.Option(help="Cores.")] = None,
    memory_mb: Annotated[int | None, typer.Option("--memory-mb", "-m")] = None,
    disk_mb: Annotated[int | None, typer.Option("--disk-mb")] = None,
    pids: Annotated[int | None, typer.Option(help="Processes and threads.")] = None,
    env: Env = None,
    user: User = None,
    workdir: Annotated[str | None, typer.Option("--workdir", "-w")] = None,
    idle_stop_s: Annotated[float | None, typer.Option(help="Stop after so long idle.")] = None,
    deadline_s: Annotated[float | None, typer.Option(help="Stop after so long.")] = None,
    allow: Annotated[list[str] | None, typer.Option(help="Network rule to allow.")] = None,
    deny: Annotated[list[str] | None, typer.Option(help="Network rule to deny.")] = None,
    policy: Annotated[
        str | None,
        typer.Option(metavar="NAME|@FILE", help="locked, research, build, a named policy, a file."),
    ] = None,
    job: Annotated[str | None, typer.Option(help="The job it belongs to.")] = None,
    label: Labels = None,
    create_timeout: Annotated[float, typer.Option(help="Seconds to wait for it.")] = 120.0,
    timeout: TimeLimit = None,
    interactive: Stdin = False,
    keep: Annotated[bool, typer.Option("--keep", help="Leave it running.")] = False,
    as_json: Json = False,
) -> None:
    """Runs CMD in a new sandbox of IMAGE, which ends with it. Without CMD, makes a
    sandbox that stays and prints its id."""
    wanted: dict[str, Any] = {
        "backend": backend, "container_image": None if image == "-" else image,
        "layers": layer, "cpu_cores_limit": cpus, "memory_limit_mb": memory_mb,
        "disk_limit_mb": disk_mb, "pids_limit": pids, "init_user": user, "workdir": workdir,
        "ttl_running_stop": idle_stop_s, "deadline_s": deadline_s, "job": job,
    }  # fmt: skip
    rules = dict.fromkeys(allow or (), True) | dict.fromkeys(deny or (), False)

    async def work() -> int | None:
        wanted["policy"] = None if policy is None else policy_of(policy)
        args = DSecRunArgs(
            **{k: v for k, v in wanted.items() if v is not None},
            env=pairs(env, "env"),
            labels=pairs(label, "labels"),
            network_rules=rules,
        )
        stays = keep or not command
        async with client(keep=stays) as c:
            sandbox = await c.create(args, timeout=create_timeout)
            if not command:
                _announce(sandbox, as_json=as_json)
                return 0
            options = {"timeout": timeout}
            code = await _execute(
                sandbox, command, stdin=interactive, as_json=as_json, options=options
            )
            if not stays:
                await sandbox.stop()
            return code

    run(work, as_json=as_json)


def _announce(sandbox: Sandbox, *, as_json: bool) -> None:
    if as_json:
        emit({"id": sandbox.id, "state": sandbox.state, "node": sandbox.node})
    else:
        print(sandbox.id)


def execute(
    id: Annotated[str, typer.Argument(help="The sandbox.")],
    command: Command = None,
    cwd: Annotated[str | None, typer.Option("--cwd", "-w")] = None,
    env: Env = None,
    user: User = None,
    timeout: TimeLimit = None,
    interactive: Stdin = False,
    as_json: Json = False,
) -> None:
    """Runs CMD in a sandbox: one word is a shell line, several are its arguments."""

    if not command:
        raise typer.BadParameter("a command is missing")

    async def work() -> int | None:
        async with client() as c:
            sandbox = await c.get(id)
            options = {"cwd": cwd, "env": pairs(env, "env"), "user": user, "timeout": timeout}
            return await _execute(
                sandbox, command, stdin=interactive, as_json=as_json, options=options
            )

    run(work, as_json=as_json)


async def _execute(
    sandbox: Sandbox,
    command: Sequence[str],
    *,
    stdin: bool,
    as_json: bool,
    options: dict[str, Any],
) -> int:
    """The exit code; output goes where ours goes, or into one JSON object."""
    if as_json:
        data = sys.stdin.buffer.read() if stdin else None
        result = await sandbox.exec(*command, stdin=data, **options)
        emit({**asdict(result), "stdout": result.text, "stderr": result.stderr_text})
    else:
        process = await sandbox.spawn(*command, stdin=stdin, **options)
        result = await pump(process, stdin=stdin)
        write_all(1, result.stdout)
        write_all(2, result.stderr)
    return exit_code(result)


def shell(
    id: Annotated[str, typer.Argument(help="The sandbox.")],
    session: Annotated[
        str | None, typer.Option(help="Run lines in this session instead.", show_default=False)
    ] = None,
    user: User = None,
) -> None:
    """A shell in a sandbox on this terminal: full screen, job control, Ctrl-C inside. With
    --session, or where input and output are no terminal, lines are run one by one in a
    session ("main") whose directory, variables and functions persist, also between calls;
    Ctrl-C then ends the running line."""

    async def work() -> int:
        async with client() as c:
            sandbox = await c.get(id)
            if session is None and on_terminal():
                return await interact(sandbox, user=user)
            return await _lines(sandbox, session or "main", user)

    run(work)


async def _lines(sandbox: Sandbox, session: str, user: str | None) -> int:
    """Runs lines of our input until its end; the last one's exit code."""
    code = 0
    while True:
        line = await asyncio.to_thread(_prompt, f"{sandbox.id}:{session}$ ")
        if line is None or line.strip() == "exit":
            return code
        if line.strip():
            result = await sandbox.run_shell(line, session=session, user=user, on_output=_show)
            code = exit_code(result)


def _prompt(text: str) -> str | None:
    try:
        return input(text if sys.stdin.isatty() else "")
    except EOFError:
        return None


def _show(name: str, data: bytes) -> None:
    write_all(1 if name == "stdout" else 2, data)
