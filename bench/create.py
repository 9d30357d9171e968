"""create: from the SDK's call to the first exec answered, warm, one at a time.

Beside it, in turns, ``docker run`` + ``docker exec`` through the Engine API with the
same image. Removal is outside the timed part for both.
"""

from __future__ import annotations

from typing import Any

from bench.docker_peer import docker_peer
from bench.harness import in_turns, local_system, spread
from bench.images import BASE, rootfs
from libdsec import DSecContainerRunArgs

ROUNDS, QUICK_ROUNDS = 120, 30
WARM_ROUNDS = 5


async def run(*, quick: bool) -> dict[str, Any]:
    """Figures: p50_ms p99_ms docker_p50_ms ratio_docker and their kin."""
    args = DSecContainerRunArgs(container_image=BASE, memory_limit_mb=512, cpu_cores_limit=1)
    rounds = QUICK_ROUNDS if quick else ROUNDS
    with docker_peer(rootfs()) as peer:
        async with local_system() as (_, client):
            created: list[Any] = []

            async def ours() -> None:
                sandbox = await client.run_container(args)
                result = await sandbox.exec("true")
                if result.exit_code != 0:
                    raise RuntimeError(f"exec true: {result}")
                created.append(sandbox)

            def theirs() -> None:
                containers.append(peer.run_and_exec())

            containers: list[Any] = []
            mine: list[float] = []
            docker: list[float] = []
            for number in range(WARM_ROUNDS + rounds):
                one, other = await in_turns(1, ours, theirs)
                if number >= WARM_ROUNDS:
                    mine += one
                    docker += other
                await created.pop().stop()
                peer.remove(containers.pop())
    figures = spread(mine) | spread(docker, "docker_")
    figures["ratio_docker"] = round(figures["docker_p50_ms"] / figures["p50_ms"], 1)
    return figures
