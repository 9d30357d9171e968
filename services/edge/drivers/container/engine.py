"""Docker Engine, through the ``docker`` package; no other module imports it.

Owns: the shell image, shells as containers, their labels. Does not own: which shells
exist (the pool), sandboxes. Calls run in threads of a bounded pool with deadlines; an
engine that does not answer is ``Unavailable``. Nothing of the engine's own
configuration is relied on.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import tarfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import docker
import requests
from docker.errors import APIError, DockerException, ImageNotFound
from docker.errors import NotFound as NoContainer
from docker.types import LogConfig

from services.edge.drivers.container.settings import ContainerSettings
from services.edge.machine import profiles
from shared.errors import Unavailable

T = TypeVar("T")

IMAGE = "dsec-shell"
SOCKET_DIR = "/run/dsec"
SOCKET = "agent.sock"
NOTHING = "nothing"
"""A file that guest/attach lays over what is hidden."""
LABEL_NODE = "dsec.node"
LABEL_NAME = "dsec.name"
LABEL_INSTANCE = "dsec.instance"
DROPPED_CAPS = ["NET_RAW", "MKNOD"]  # raw packets pass socket rules; nodes are not needed


@dataclass(frozen=True, slots=True)
class Shell:
    """A container of the engine; ``pid`` is its first process on the host, 0 when it
    does not run."""

    id: str
    name: str
    pid: int
    instance: str = ""


@dataclass(frozen=True, slots=True)
class Ending:
    """What the engine knows about a container that ended."""

    running: bool
    exit_code: int | None = None
    oom: bool = False
    last_words: str = ""


class Engine:
    """One engine, reached when it is first needed; it may come and go."""

    def __init__(self, settings: ContainerSettings, instance: str) -> None:
        self._settings = settings
        self._instance = instance
        self._threads = ThreadPoolExecutor(settings.engine_threads, "engine")
        self._client: docker.DockerClient | None = None
        self._lock = threading.RLock()
        self._image = ""
        self._cgroup_parent = "/" + settings.cgroup_parent

    async def _call(self, work: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._settings.engine_s):
                return await loop.run_in_executor(self._threads, work)
        except TimeoutError as err:
            raise Unavailable("the container engine does not answer in time") from err
        except (DockerException, requests.RequestException, OSError) as err:
            raise Unavailable(f"the container engine failed: {_short(err)}") from err

    @property
    def _api(self) -> Any:
        """Only in threads of :meth:`_call`: it may have to reach the engine first."""
        self._connect()
        assert self._client is not None
        return self._client.api

    async def version(self) -> str:
        """Reaches the engine; raises ``Unavailable``."""
        return str((await self._call(lambda: self._api.version()))["Version"])

    def _connect(self) -> None:
        with self._lock:
            if self._client is not None:
                return
            url = self._settings.docker_url
            timeout = int(self._settings.engine_s)
            client = (
                docker.DockerClient(base_url=url, timeout=timeout, version="auto")
                if url
                else docker.DockerClient.from_env(timeout=timeout, version="auto")
            )
            if client.api.info().get("CgroupDriver") == "systemd":
                self._cgroup_parent = self._settings.cgroup_parent + ".slice"
            self._client = client

    def _ready(self) -> None:
        """Reaches the engine and makes the shell image, where that was not done yet."""
        self._connect()
        with self._lock:
            if not self._image:
                self._image = self._ensure_image()

    def _ensure_image(self) -> str:
        content = _image_tar(self._settings.aether.read_bytes())
        tag = hashlib.sha256(content).hexdigest()[:16]
        try:
            self._api.inspect_image(f"{IMAGE}:{tag}")
        except ImageNotFound:
            self._api.import_image_from_data(content, repository=IMAGE, tag=tag)
        return f"{IMAGE}:{tag}"

    async def create_shell(self, name: str, socket_dir: Path) -> Shell:
        """Creates and starts a shell whose agent listens in ``socket_dir`` and answers
        with ``name`` as its generation. When it fails, nothing of it is left; when it
        is cancelled, the caller removes what is there by ``name`` and what comes into
        being later removes itself."""
        abandoned = threading.Event()
        try:
            return await self._call(lambda: self._create_shell(name, socket_dir, abandoned))
        except BaseException:
            abandoned.set()
            raise

    def _create_shell(self, name: str, socket_dir: Path, abandoned: threading.Event) -> Shell:
        self._ready()
        api = self._api
        # commands get a profile each; the engine's own forbids changing to one
        unconfined = ["apparmor=unconfined"] if profiles.in_force() else []
        host = api.create_host_config(
            binds=[f"{socket_dir}:{SOCKET_DIR}"],
            network_mode="none",
            cgroup_parent=self._cgroup_parent,
            cgroupns="private",
            cap_drop=DROPPED_CAPS,
            security_opt=["no-new-privileges", *unconfined],
            log_config=LogConfig(type="json-file", config={"max-size": "64k", "max-file": "1"}),
            restart_policy={"Name": "no"},
        )
        made = self._create(name, host)
        try:
            api.start(made)
            pid = int(api.inspect_container(made)["State"]["Pid"])
            if not pid:
                words = self._last_words(made)
                raise DockerException(f"the shell ended at once: {words}")
            if abandoned.is_set():
                raise DockerException("nobody waits for the shell any more")
            return Shell(made, name, pid, self._instance)
        except BaseException:
            api.remove_container(made, force=True)
            raise

    def _create(self, name: str, host: Any) -> str:
        labels = {
            LABEL_NODE: self._settings.node, LABEL_NAME: name, LABEL_INSTANCE: self._instance,
        }  # fmt: skip
        try:
            made = self._api.create_container(
                self._image, ["/aether", f"{SOCKET_DIR}/{SOCKET}", name],
                name=name, host_config=host, hostname="sandbox", labels=labels,
                network_disabled=True,  # a namespace of its own all the same, for half the time
            )  # fmt: skip
        except ImageNotFound:
            self._image = ""  # someone removed it: the next attempt makes it again
            raise
        return str(made["Id"])

    async def ending(self, container_id: str) -> Ending:
        """How the container ended; of one that no longer exists nothing is known."""
        return await self._call(lambda: self._ending(container_id))

    def _ending(self, container_id: str) -> Ending:
        try:
            state = self._api.inspect_container(container_id)["State"]
        except NoContainer:
            return Ending(False, last_words="the container is gone")
        if state["Running"]:
            return Ending(True)
        words = self._last_words(container_id)
        return Ending(False, int(state["ExitCode"]), bool(state["OOMKilled"]), words)

    def _last_words(self, container_id: str) -> str:
        try:
            raw = self._api.logs(container_id, stdout=True, stderr=True, tail=20)
        except (APIError, requests.RequestException):
            return ""
        return bytes(raw)[-self._settings.message_bytes :].decode(errors="replace").strip()

    async def pid(self, container_id: str) -> int:
        """The container's first process on the host, 0 when it does not run."""
        return await self._call(lambda: self._pid(container_id))

    def _pid(self, container_id: str) -> int:
        try:
            return int(self._api.inspect_container(container_id)["State"]["Pid"])
        except NoContainer:
            return 0

    async def remove(self, container_id: str) -> None:
        """Removes the container with all that is in it; one that is gone is fine."""
        await self._call(lambda: self._remove(container_id))

    def _remove(self, container_id: str) -> None:
        try:
            self._api.remove_container(container_id, force=True, v=True)
        except NoContainer:
            return
        except APIError as err:
            if "already in progress" not in str(err):
                raise

    async def shells(self) -> list[Shell]:
        """Every container with this node's mark, of this edge process or another."""
        return await self._call(self._shells)

    def _shells(self) -> list[Shell]:
        found = self._api.containers(
            all=True, filters={"label": f"{LABEL_NODE}={self._settings.node}"}
        )
        return [
            Shell(c["Id"], c["Labels"].get(LABEL_NAME, ""), 0, c["Labels"].get(LABEL_INSTANCE, ""))
            for c in found
        ]

    async def close(self) -> None:
        """Waits, within the engine's limit, for calls that nobody waits for any more: a
        shell that is made meanwhile removes itself, and only then is nothing left."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.engine_s):
                await asyncio.to_thread(self._threads.shutdown, wait=True)
        if self._client is not None:
            self._client.close()
            self._client = None


def _short(err: BaseException) -> str:
    text = getattr(err, "explanation", None) or str(err)
    return str(text)[:512]


def _image_tar(aether: bytes) -> bytes:
    """The shell image: the agent, the places to mount on, and what is laid over hidden files."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name in ("newroot", "proc", "dev", "sys", "etc", "run", "run/dsec"):
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(folder)
        nothing = tarfile.TarInfo(NOTHING)
        nothing.mode = 0o444
        tar.addfile(nothing)
        binary = tarfile.TarInfo("aether")
        binary.size, binary.mode = len(aether), 0o111
        tar.addfile(binary, io.BytesIO(aether))
    return out.getvalue()
