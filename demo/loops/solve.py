"""The loop: asks a model for the next command, runs it, until the model is content.

Owns: one rollout of it. Does not own: where it runs. The same function is called in a
trainer (:func:`libdsec.rollout.here`) and in a worker (:func:`libdsec.rollout.submit`),
so it imports only what both have. Run again, it is answered from the log up to where it was,
also what the model said: that one says something else to the same question each time.
"""

from __future__ import annotations

import asyncio
import json
from functools import partial
from typing import Any

from libdsec import DSecContainerRunArgs
from libdsec.rollout import Rollout

TURNS = 12
COMMAND_S = 60.0
ASKS, AGAIN_S = 60, 0.5
LIMITS: dict[str, Any] = {"memory_limit_mb": 128, "cpu_cores_limit": 0.5, "init_user": "root"}


async def solve(rollout: Rollout) -> dict[str, Any]:
    """``rollout.prompt``: ``image``, ``task`` (told to the model), ``check`` (a command
    that succeeds where the task is solved)."""
    prompt = rollout.prompt
    sandbox = await rollout.sandbox(DSecContainerRunArgs(container_image=prompt["image"], **LIMITS))
    said: list[dict[str, Any]] = []
    for turn in range(TURNS):
        question = {"task": prompt["task"], "sample": rollout.index, "said": said}
        command = await rollout.ask(question, partial(post, rollout))
        if command is None:
            break
        result = await sandbox.exec(command, timeout=COMMAND_S)
        said.append({"command": command, "exit": result.exit_code, "output": result.text})
        rollout.tell({"turn": turn, "exit": result.exit_code})
    checked = await sandbox.exec(prompt["check"], timeout=COMMAND_S)
    return {"reward": 1.0 if checked.ok else 0.0, "turns": len(said)}


async def post(rollout: Rollout, question: dict[str, Any]) -> str | None:
    """What the model says: the next command, ``None`` at the end. A connection that breaks
    off, as when the node's service restarts, is made again: the question is the same."""
    for left in reversed(range(ASKS)):
        try:
            command: str | None = json.loads(await _post(*rollout.address("model"), question))[
                "command"
            ]
            return command
        except (OSError, ValueError):
            if not left:
                raise
            await asyncio.sleep(AGAIN_S)
    raise AssertionError


async def _post(host: str, port: int, question: dict[str, Any]) -> bytes:
    """The body of the answer. HTTP without a library."""
    body = json.dumps(question).encode()
    reader, writer = await asyncio.open_connection(host, port)
    try:
        head = f"POST / HTTP/1.0\r\nHost: model\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        return (await reader.read()).partition(b"\r\n\r\n")[2]
    finally:
        writer.close()
