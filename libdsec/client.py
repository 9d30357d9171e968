"""The client: where users begin.

Owns: opening and closing, running and finding sandboxes, managers. Does not own:
one sandbox (:mod:`libdsec.sandbox`) or the way of a create (:mod:`libdsec._create`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any, Literal, overload

from nats.aio.msg import Msg

from libdsec import _ids, config
from libdsec._bounded import Bounded
from libdsec._core import Core
from libdsec._create import CREATE_S, Made, create
from libdsec._wire import (
    MAX_BATCH,
    IamQuery,
    IamReply,
    SandboxEvent,
    SandboxQuery,
    decode,
)
from libdsec.args import (
    DSecContainerRunArgs,
    DSecMicroVMRunArgs,
    DSecRunArgs,
    DSecVMRunArgs,
    Seconds,
    seconds,
)
from libdsec.audit import Audit
from libdsec.errors import DSecError, InvalidRequest, NotFound
from libdsec.images import Images
from libdsec.jobs import LEASE_S, Job, Jobs
from libdsec.managers import Grants, Keys, Nodes, Policies, Projects, Quotas
from libdsec.results import Event
from libdsec.sandbox import Sandbox
from libdsec.secrets import Secrets
from libdsec.snapshots import Layer, Snapshot, branches, restored_spec

OPEN_S = 10.0
EVENTS_MAX = 10_000
"""Events that may wait for a slow reader."""


class DSecClient:
    """A connection to dsec, as one principal in one project.

    ``url`` (``nats://host:port``, several with commas), ``api_key`` and ``project``
    come from the arguments, from ``DSEC_URL``, ``DSEC_API_KEY``, ``DSEC_PROJECT`` or
    from ``~/.config/dsec/config.toml``. ``async with`` opens and closes. Closing
    stops the sandboxes that were created here outside of a job, unless ``keep``.
    """

    def __init__(
        self,
        url: str | None = None,
        api_key: str | None = None,
        project: str | None = None,
        *,
        open_timeout: Seconds = OPEN_S,
        keep: bool = False,
    ) -> None:
        self._config = config.load(url=url, api_key=api_key, project=project)
        self._open_s = seconds(open_timeout, "open_timeout") or OPEN_S
        self._core = Core(self._config)
        self._keep = keep
        self._opened = False
        self._make_managers()

    def _make_managers(self) -> None:
        core = self._core
        self.images = Images(core)
        self.projects = Projects(core)
        self.keys = Keys(core)
        self.grants = Grants(core)
        self.quotas = Quotas(core)
        self.nodes = Nodes(core)
        self.secrets = Secrets(core)
        self.policies = Policies(core)
        self.audit = Audit(core)
        self.jobs = Jobs(core)

    def __repr__(self) -> str:
        state = "open" if self._opened else "closed"
        return f"DSecClient({self._config.url!r}, project={self.project!r}, {state})"

    @property
    def project(self) -> str:
        """The project that calls without one mean."""
        return self._config.project

    @property
    def principal(self) -> str:
        """Who the key says we are."""
        return self._config.principal

    async def open(self) -> DSecClient:
        """Connects. Raises ``Unauthenticated`` or ``Unavailable``. Idempotent."""
        if not self._opened:
            self._core = Core(self._config)
            self._make_managers()
            await self._core.open(self._open_s)
            self._opened = True
        return self

    async def close(self) -> None:
        """Stops the sandboxes created here outside of a job, and disconnects.
        Idempotent; finishes even when it is cancelled."""
        if self._opened:
            self._opened = False
            await asyncio.shield(asyncio.ensure_future(self._core.close()))

    async def __aenter__(self) -> DSecClient:
        return await self.open()

    async def __aexit__(self, *_exc: object) -> None:
        await self.close()

    async def whoami(self) -> IamReply:
        """``.principal``, ``.grants`` and ``.project`` of this connection."""
        subject = self._core.calls.get_subject(self.project, "whoami", "get")
        return await self._core.calls.read(subject, IamQuery(), IamReply)

    # -- making ------------------------------------------------------------------

    async def run_container(
        self,
        args: DSecContainerRunArgs,
        *,
        timeout: Seconds = CREATE_S,
        wait: bool = True,
        request_id: str | None = None,
    ) -> Sandbox:
        """A container; see :meth:`create`."""
        return await self._run(args, DSecContainerRunArgs, timeout, wait, request_id)

    async def run_microvm(
        self,
        args: DSecMicroVMRunArgs,
        *,
        timeout: Seconds = CREATE_S,
        wait: bool = True,
        request_id: str | None = None,
    ) -> Sandbox:
        """A microVM; see :meth:`create`."""
        return await self._run(args, DSecMicroVMRunArgs, timeout, wait, request_id)

    async def run_vm(
        self,
        args: DSecVMRunArgs,
        *,
        timeout: Seconds = CREATE_S,
        wait: bool = True,
        request_id: str | None = None,
    ) -> Sandbox:
        """A full virtual machine; see :meth:`create`."""
        return await self._run(args, DSecVMRunArgs, timeout, wait, request_id)

    async def _run(
        self,
        args: DSecRunArgs,
        type_: type[DSecRunArgs],
        timeout: Seconds,
        wait: bool,
        request_id: str | None,
    ) -> Sandbox:
        if not isinstance(args, type_):
            raise InvalidRequest(f"expected {type_.__name__}, got {args!r}", field="args")
        return await self.create(args, timeout=timeout, wait=wait, request_id=request_id)

    async def create(
        self,
        args: DSecRunArgs,
        *,
        timeout: Seconds = CREATE_S,
        wait: bool = True,
        request_id: str | None = None,
    ) -> Sandbox:
        """One sandbox of any backend, ready: its agent answered. ``wait=False`` returns
        as soon as the request is stored. The same ``request_id`` is the same sandbox;
        with other arguments it is a ``Conflict``. After ``timeout`` seconds, or when
        cancelled, nothing of it is left."""
        args.validate()
        made = await self._create([args], 1, timeout=timeout, wait=wait, request_id=request_id)
        if made[0].error is not None:
            raise made[0].error
        return self._sandbox(made[0], args)

    async def create_many(
        self,
        args: DSecRunArgs | Sequence[DSecRunArgs],
        *,
        n: int | None = None,
        timeout: Seconds = CREATE_S,
        wait: bool = True,
        request_id: str | None = None,
    ) -> list[Sandbox | DSecError]:
        """``n`` sandboxes alike, or one for each of a list, in one request. Results keep
        the order; a bad item gets its own error and the others run."""
        many = [args] if isinstance(args, DSecRunArgs) else list(args)
        count = 1 if n is None else n
        if not many and n is None:
            return []
        if count < 1 or (count > 1 and len(many) != 1):
            raise InvalidRequest("n goes with one set of arguments and is at least 1", field="n")
        if len(many) * count > MAX_BATCH:
            raise InvalidRequest(f"at most {MAX_BATCH} sandboxes in one request", field="n")
        made = await self._create(many, count, timeout=timeout, wait=wait, request_id=request_id)
        each = many if count == 1 else many * count
        return [
            m.error if m.error is not None else self._sandbox(m, a)
            for m, a in zip(made, each, strict=True)
        ]

    async def _create(
        self,
        many: Sequence[DSecRunArgs],
        count: int,
        *,
        timeout: Seconds,
        wait: bool,
        request_id: str | None,
    ) -> list[Made]:
        limit = seconds(timeout, "timeout")
        if limit is None or not 0 < limit <= 86_400:
            raise InvalidRequest("timeout: more than 0 and at most 86400 s", field="timeout")
        if request_id is not None and not _ids.is_ulid(request_id):
            raise InvalidRequest("request_id: expected a ULID, lower case", field="request_id")
        return await create(
            self._core,
            [a.to_spec() for a in many],
            count=count,
            timeout_s=limit,
            request_id=request_id or _ids.new(),
            wait=wait,
            kept=[self._keep or a.job is not None for a in many] * count,
        )

    def _sandbox(self, made: Made, args: DSecRunArgs) -> Sandbox:
        return Sandbox(
            self._core,
            made.uid,
            project=self.project,
            state=made.state,
            id=made.id,
            node=made.node,
            job=args.job,
            labels=args.labels,
            spec=args.to_spec(),
        )

    @overload
    async def restore(
        self, snapshot: Snapshot | Layer | str, n: Literal[1] = 1, *, job: str | None = None,
        timeout: Seconds = CREATE_S, request_id: str | None = None,
    ) -> Sandbox: ...  # fmt: skip
    @overload
    async def restore(
        self, snapshot: Snapshot | Layer | str, n: int, *, job: str | None = None,
        timeout: Seconds = CREATE_S, request_id: str | None = None,
    ) -> Sandbox | list[Sandbox]: ...  # fmt: skip
    async def restore(
        self, snapshot: Snapshot | Layer | str, n: int = 1, *, job: str | None = None,
        timeout: Seconds = CREATE_S, request_id: str | None = None,
    ) -> Sandbox | list[Sandbox]:  # fmt: skip
        """A new sandbox with the disk of a snapshot (or packed layer, or the name of
        either), on any node, with the limits of the sandbox it is of; for ``n`` above 1 a
        list of so many, all or none. Raises ``NotFound``."""
        image = await self.images.get(snapshot) if isinstance(snapshot, str) else snapshot.image
        made = await branches(
            self._core, restored_spec(image, job=job), n, timeout=timeout, request_id=request_id,
            kept=self._keep or job is not None,
        )  # fmt: skip
        return made[0] if n == 1 else made

    def job(self, id: str, *, lease_s: Seconds = LEASE_S, on_lost: str = "pause") -> Job:
        """The job ``id``, to be held: ``async with client.job("run-7") as job``. While it is
        held its lease of ``lease_s`` seconds is renewed. When nobody renews it, ``on_lost``
        (``pause``, ``stop`` or ``keep``) happens to its sandboxes."""
        return Job(self, id, lease_s=lease_s, on_lost=on_lost)

    # -- finding -----------------------------------------------------------------

    async def get(self, id: str) -> Sandbox:
        """A sandbox by its id. Raises ``NotFound``."""
        found = await self._core.lookup(_ids.uid_of(id), self.project)
        if found is None:
            raise NotFound(f"there is no sandbox {id}", field="id")
        return Sandbox._of(self._core, found)

    async def list(
        self,
        *,
        job: str | None = None,
        labels: Mapping[str, str] | None = None,
        state: str | Iterable[str] | None = None,
        node: str | None = None,
    ) -> AsyncIterator[Sandbox]:
        """Sandboxes of the project in the order they were asked for, those that are
        over too unless ``state`` says otherwise."""
        states = [state] if isinstance(state, str) else [*(state or ())]
        query = SandboxQuery(job=job, labels=dict(labels or {}), states=states, node=node)  # type: ignore[arg-type]
        async for found in self._core.sandboxes(query, self.project):
            yield Sandbox._of(self._core, found)

    async def stop_many(
        self,
        sandboxes: Iterable[Sandbox | str] | None = None,
        *,
        job: str | None = None,
        labels: Mapping[str, str] | None = None,
        grace_s: Seconds = 0.0,
    ) -> dict[str, DSecError | str]:
        """Stops those named (objects or ids), or all of a job, or all that carry labels:
        uid → its state, or its error."""
        grace = seconds(grace_s, "grace_s") or 0.0
        if sandboxes is None:
            if job is None and not labels:
                raise InvalidRequest("name sandboxes, a job or labels", field="sandboxes")
            return await self._core.operate_where(
                "stop", job=job, labels=dict(labels or {}), grace_s=grace
            )
        by_project: dict[str, dict[str, Sandbox | None]] = {}
        for item in sandboxes:
            if isinstance(item, Sandbox):
                by_project.setdefault(item.project, {})[item.uid] = item
            elif isinstance(item, str):
                by_project.setdefault(self.project, {})[_ids.uid_of(item)] = None
        results: dict[str, DSecError | str] = {}
        for project, named in by_project.items():
            results |= await self._core.operate("stop", project, named, grace_s=grace)
            _note(self._core, named, results)
        return results

    async def events(
        self, *, job: str | None = None, labels: Mapping[str, str] | None = None
    ) -> AsyncIterator[Event]:
        """State changes of the project's sandboxes (running, paused and the terminal
        ones) from the first step of the iteration on, each once."""
        queue: Bounded[SandboxEvent] = Bounded(EVENTS_MAX, "events")
        told: dict[str, None] = {}

        async def put(message: Msg) -> None:
            # one whose acknowledgement came late was sent again; the stream drops it
            id_ = (message.headers or {}).get("Nats-Msg-Id", "")
            if id_ in told:
                return
            if id_:
                told[id_] = None
                if len(told) > EVENTS_MAX:
                    del told[next(iter(told))]
            queue.put(decode(message.data, SandboxEvent))

        end = await self._core.link.listen(f"dsec.evt.v1.sandbox.{self.project}.>", put)
        try:
            while True:
                event = await queue.get()
                if _matches(event, job, labels):
                    yield _event(event)
        finally:
            await end()


def _note(core: Core, named: Mapping[str, Sandbox | None], results: Mapping[str, Any]) -> None:
    """What was stopped is over for its objects and for the client's close."""
    for uid, sandbox in named.items():
        outcome = results.get(uid)
        if isinstance(outcome, str):
            core.owned.pop(uid, None)
            if sandbox is not None:
                sandbox.state = outcome


def _matches(event: SandboxEvent, job: str | None, labels: Mapping[str, str] | None) -> bool:
    if job is not None and event.job != job:
        return False
    return all(event.labels.get(k) == v for k, v in (labels or {}).items())


def _event(event: SandboxEvent) -> Event:
    values = {name: getattr(event, name) for name in Event.__dataclass_fields__}
    return Event(**values)
