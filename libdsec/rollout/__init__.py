"""Agent loops that run outside of the trainer.

    from libdsec import rollout

    run = await rollout.submit(
        client, "run-7", loop="loops/solve.py:solve", prompts=prompts, group_size=8,
        container_image="worker:1",
    )
    async for event in run.events():          # another process goes on after any of them
        ...
    results = await run.results()
    await run.stop()

A worker container runs the loop, once for each prompt and place in its group, with an
identity of its own; it makes the agents' sandboxes and holds, together with them, all
that the rollouts are. A trainer that dies loses nothing: whoever calls :func:`attach`
with the same id goes on. :func:`here` runs the same loop in the trainer itself.
"""

from __future__ import annotations

from libdsec.rollout._loop import Rollout, here
from libdsec.rollout._messages import Event, Result
from libdsec.rollout._run import GRANTS, Run, attach, submit

__all__ = ["GRANTS", "Event", "Result", "Rollout", "Run", "attach", "here", "submit"]
