"""Local images of a container engine.

Owns: the one use of the ``docker`` package in this service. Does not own: the
archive's format.
"""

from __future__ import annotations

from collections.abc import Iterator

import docker
import requests
import urllib3
from docker.errors import DockerException, ImageNotFound

from shared.errors import NotFound, Unavailable

SAVE_CHUNK_BYTES = 1024 * 1024
FIELD = "docker"


class DockerEngine:
    """Reads images; ``base_url`` as ``DOCKER_HOST`` has it, ``None`` for the environment's."""

    def __init__(self, *, base_url: str | None = None, timeout_s: float = 60) -> None:
        self._base_url = base_url
        self._timeout_s = timeout_s

    def save(self, reference: str) -> Iterator[bytes]:
        """The ``docker save`` stream of one image.

        Raises :class:`NotFound` or :class:`Unavailable` (no engine, stream cut).
        """
        try:
            client = self._client()
            try:
                image = client.images.get(reference)
                yield from image.save(chunk_size=SAVE_CHUNK_BYTES)
            finally:
                client.close()
        except ImageNotFound as error:
            raise NotFound(f"the engine has no image {reference!r}", field=FIELD) from error
        except (DockerException, requests.RequestException, urllib3.exceptions.HTTPError) as error:
            raise Unavailable(f"container engine: {error}", field=FIELD) from error

    def _client(self) -> docker.DockerClient:
        if self._base_url is None:
            return docker.from_env(timeout=self._timeout_s)
        return docker.DockerClient(base_url=self._base_url, timeout=self._timeout_s)
