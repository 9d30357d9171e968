"""A task for ``inspect eval``: files, setup, tools of a mock model, a scorer that looks
into the sandbox. Its verdicts come from the sandbox, so a broken one cannot pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessage, ChatMessageTool, ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import Score, Scorer, Target, accuracy, scorer
from inspect_ai.solver import TaskState, generate, use_tools
from inspect_ai.tool import bash
from inspect_ai.util import ExecResult, sandbox

SAMPLES = 4
COMMAND = "cat prepared.txt && echo $(( $(cat number.txt) * 2 )) > answer.txt"


@scorer(metrics=[accuracy()])
def left_in_the_sandbox() -> Scorer:
    """Right when the file that the model's command wrote holds the doubled number, and
    the model saw the command's output."""

    async def score(state: TaskState, target: Target) -> Score:
        found = await sandbox().read_file("answer.txt")
        whoami: ExecResult[str] = await sandbox().exec(["whoami"])
        root = await sandbox().exec(["whoami"], user="root")
        seen = [m.text for m in state.messages if isinstance(m, ChatMessageTool)]
        right = (
            found == f"{target.text}\n"
            and (whoami.stdout, root.stdout) == ("agent\n", "root\n")
            and any("prepared" in text for text in seen)
        )
        return Score(value="C" if right else "I", explanation=f"{found!r} {seen}")

    return score


def answers(command: str) -> Callable[..., ModelOutput]:
    """The mock model: one call of a tool, and a closing word once its output is there."""

    def answer(input: list[ChatMessage], *_rest: Any) -> ModelOutput:
        if isinstance(input[-1], ChatMessageTool):
            output = ModelOutput.from_content("mockllm/model", "done")
        else:
            output = ModelOutput.for_tool_call("mockllm/model", "bash", {"command": command})
        output.usage = ModelUsage()  # else Inspect counts tokens with a table from the network
        return output

    return answer


@task
def doubling(image: str = "client:1", command: str = COMMAND) -> Task:
    """Samples that differ by a file."""
    samples = [
        Sample(
            input=f"Double the number in number.txt ({n})",
            target=str(2 * n),
            files={"number.txt": str(n), "deep/er/copy.txt": str(n)},
            setup="echo prepared > prepared.txt",
            metadata={"image": image},
        )
        for n in range(1, SAMPLES + 1)
    ]
    return Task(
        dataset=samples,
        solver=[use_tools(bash(timeout=20)), generate()],
        scorer=left_in_the_sandbox(),
        sandbox=("dsec", "eval.yaml"),
        model=get_model("mockllm/model", custom_outputs=answers(command)),
    )
