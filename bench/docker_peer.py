"""Docker Engine as the peer: the same image, the Engine API, no command-line client."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import docker
from docker.models.containers import Container

LABEL = "dsec.bench"
IMAGE = "dsec-bench-base:1"


class DockerPeer:
    """``run`` + ``exec true`` + remove, and ``exec true`` in a running container."""

    def __init__(self, rootfs: Path) -> None:
        self._client = docker.from_env(timeout=120)
        if not self._client.images.list(name=IMAGE.split(":")[0]):
            self._import(rootfs)

    def _import(self, rootfs: Path) -> None:
        # streamed by the client binary's own protocol: a tar on stdin of the API call
        with subprocess.Popen(
            ["tar", "-C", str(rootfs), "-c", "."] if rootfs.is_dir() else ["cat", str(rootfs)],
            stdout=subprocess.PIPE,
        ) as tar:
            assert tar.stdout is not None
            self._client.api.import_image_from_stream(
                tar.stdout, repository=IMAGE.split(":")[0], tag=IMAGE.split(":")[1]
            )

    def start(self) -> Container:
        """A running container with its own network namespace, like our sandboxes."""
        return self._client.containers.run(
            IMAGE, ["sleep", "3600"], detach=True, network_mode="none", mem_limit="512m",
            pids_limit=512, labels={LABEL: "1"},
        )  # fmt: skip

    def exec_true(self, container: Container) -> None:
        """``true`` through the Engine API."""
        code = container.exec_run(["true"]).exit_code
        if code != 0:
            raise RuntimeError(f"docker exec true: exit {code}")

    def run_and_exec(self) -> Container:
        """What the create benchmark compares: run, then the first exec answered."""
        container = self.start()
        self.exec_true(container)
        return container

    def remove(self, container: Container) -> None:
        """Ends a container."""
        container.remove(force=True)

    def clean(self) -> None:
        """Removes what is left of this and earlier runs."""
        for container in self._client.containers.list(all=True, filters={"label": LABEL}):
            container.remove(force=True)


@contextmanager
def docker_peer(rootfs: Path) -> Iterator[DockerPeer]:
    """A peer that leaves no container behind."""
    peer = DockerPeer(rootfs)
    try:
        yield peer
    finally:
        peer.clean()
