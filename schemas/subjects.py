"""Names on the bus: subject builders and the table of subjects.

Owns: every subject, and who may publish which. Does not own: streams and durable
consumers (:mod:`schemas.streams`), user permissions (services/auth compiles those
from here).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Transport = Literal["jetstream", "core"]


ANONYMOUS = "anonymous"
"""Who is recorded where a client used a subject without its principal."""


def req(project: str, entity: str, verb: str, principal: str | None = None) -> str:
    """A client's request that changes something. With the principal as last token
    (which the bus lets no one else use) the request is attributed; the short form
    is for trainers without an SDK and is recorded as ``anonymous``."""
    return f"dsec.req.v1.{project}.{entity}.{verb}" + (f".{principal}" if principal else "")


def get(project: str, entity: str, verb: str, principal: str | None = None) -> str:
    """A client's read; forms as in :func:`req`."""
    return f"dsec.get.v1.{project}.{entity}.{verb}" + (f".{principal}" if principal else "")


def put(project: str, entity: str, verb: str, principal: str) -> str:
    """A client's change that no stream may keep; who asks is always named."""
    return f"dsec.put.v1.{project}.{entity}.{verb}.{principal}"


def exec_(project: str, node: str, uid: str, verb: str, principal: str) -> str:
    """A client's operation at the edge that owns the sandbox."""
    return f"dsec.exec.v1.{project}.{node}.{uid}.{verb}.{principal}"


def blob(project: str, verb: str, principal: str) -> str:
    """Bytes of a client's upload to imagesvc (``put``) or of its export (``get``)."""
    return f"dsec.blob.v1.{project}.{verb}.{principal}"


def parse_blob(subject: str) -> tuple[str, str]:
    """Project and principal of a ``blob`` subject."""
    parts = subject.split(".")
    return parts[3], parts[5]


def out(node: str, principal: str, connection: str, op: str) -> str:
    """An edge's answers to one operation of one client connection: the reply
    subject of :func:`exec_` requests. An edge may publish only under its node."""
    return f"dsec.out.v1.{node}.{principal}.{connection}.{op}"


def inbox_prefix(principal: str, connection: str) -> str:
    """The inbox prefix of one client connection; nobody else may listen there."""
    return f"_INBOX.{principal}.{connection}"


@dataclass(frozen=True)
class ClientSubject:
    """What a ``req``, ``get`` or ``put`` subject says: who may be believed to ask for what."""

    project: str
    entity: str
    verb: str
    principal: str


def parse_client(subject: str) -> ClientSubject | None:
    """The parts of a ``req``, ``get`` or ``put`` subject, ``None`` for any other."""
    parts = subject.split(".")
    if len(parts) not in (6, 7) or parts[0] != "dsec" or parts[1] not in ("req", "get", "put"):
        return None
    principal = parts[6] if len(parts) == 7 else ANONYMOUS
    return ClientSubject(parts[3], parts[4], parts[5], principal)


def cmd(entity: str, verb: str, key: str) -> str:
    """A command between services; for edges the key is the node."""
    return f"dsec.cmd.v1.{entity}.{verb}.{key}"


def evt_edge(observed: str, node: str) -> str:
    """What an edge observed (``sandbox``, ``access``)."""
    return f"dsec.evt.v1.edge.{observed}.{node}"


def evt_sandbox(project: str, state: str, uid: str) -> str:
    """A sandbox changed state."""
    return f"dsec.evt.v1.sandbox.{project}.{state}.{uid}"


def evt(service: str, what: str, key: str) -> str:
    """A fact told by a service."""
    return f"dsec.evt.v1.{service}.{what}.{key}"


def sec(source: str, verdict: str, node: str) -> str:
    """A violation seen on a node."""
    return f"dsec.sec.v1.{source}.{verdict}.{node}"


def trj(node: str) -> str:
    """What was done in the sandboxes of a node: its trajectory records."""
    return f"dsec.trj.v1.{node}"


def audit(project: str, severity: str, rule: str) -> str:
    """A finding of audit."""
    return f"dsec.audit.v1.{project}.{severity}.{rule}"


def rpc(service: str, verb: str) -> str:
    """A question between services."""
    return f"dsec.rpc.v1.{service}.{verb}"


def join(node: str) -> str:
    """An edge's question to the scheduler when it starts: the key is its node."""
    return f"dsec.rpc.v1.scheduler.join.{node}"


def secrets(node: str) -> str:
    """A node's question for the secrets of one of its sandboxes."""
    return f"dsec.rpc.v1.auth.secrets.{node}"


FORGET = rpc("auth", "forget")
"""Between the instances of auth: whose permissions have changed."""


def hb(node: str) -> str:
    """A node's heartbeat."""
    return f"dsec.hb.v1.{node}"


def dlq(stream: str) -> str:
    """Messages of ``stream`` that were given up."""
    return f"dsec.dlq.v1.{stream}"


@dataclass(frozen=True)
class Subject:
    """A row of the map: who publishes what to whom."""

    pattern: str
    transport: Transport
    sender: str
    receivers: tuple[str, ...]
    message: str
    doc: str


SUBJECTS: tuple[Subject, ...] = (
    Subject("dsec.req.v1.*.sandbox.create", "jetstream", "client", ("auth",), "CreateRequest",
            "create sandboxes"),
    Subject("dsec.req.v1.*.sandbox.fork", "jetstream", "client", ("auth",), "CreateRequest",
            "create branches of a sandbox"),
    Subject("dsec.req.v1.*.sandbox.snapshot", "jetstream", "client", ("auth",), "SnapshotCreate",
            "pack what a sandbox changed"),
    Subject("dsec.req.v1.*.sandbox.report", "jetstream", "client", ("auth",), "SandboxReport",
            "what a grader saw"),
    Subject("dsec.req.v1.*.sandbox.*", "jetstream", "client", ("auth",), "SandboxOpRequest",
            "stop, pause, resume, set_timeout, tighten"),
    Subject("dsec.req.v1.*.job.*", "jetstream", "client", ("auth",), "JobRequest",
            "open, renew: the lease of a job"),
    Subject("dsec.req.v1.*.project.create", "jetstream", "client", ("auth",), "ProjectCreate",
            "make a child project"),
    Subject("dsec.req.v1.*.project.delete", "jetstream", "client", ("auth",), "ProjectDelete",
            "remove an empty project"),
    Subject("dsec.req.v1.*.key.create", "jetstream", "client", ("auth",), "KeyCreate",
            "make a principal with a key"),
    Subject("dsec.req.v1.*.key.delete", "jetstream", "client", ("auth",), "KeyDelete",
            "revoke a key"),
    Subject("dsec.req.v1.*.grant.create", "jetstream", "client", ("auth",), "GrantCreate",
            "give grants"),
    Subject("dsec.req.v1.*.grant.delete", "jetstream", "client", ("auth",), "GrantDelete",
            "take grants back"),
    Subject("dsec.req.v1.*.quota.create", "jetstream", "client", ("auth",), "QuotaCreate",
            "set limits"),
    Subject("dsec.req.v1.*.policy.create", "jetstream", "client", ("auth",), "PolicyCreate", "add"),
    Subject("dsec.req.v1.*.policy.delete", "jetstream", "client", ("auth",), "PolicyDelete", "cut"),
    Subject("dsec.req.v1.*.image.create", "jetstream", "client", ("auth",), "ImageCreate",
            "register an image"),
    Subject("dsec.req.v1.*.image.delete", "jetstream", "client", ("auth",), "ImageDelete",
            "remove an image"),
    Subject("dsec.req.v1.*.image.tag", "jetstream", "client", ("auth",), "ImageTag",
            "point a name to what another means"),
    Subject("dsec.req.v1.*.node.*", "jetstream", "client", ("auth",), "NodeCommand",
            "cordon, uncordon, drain"),
    Subject("dsec.get.v1.*.sandbox.*", "core", "client", ("auth",), "SandboxQuery", "get, list"),
    Subject("dsec.get.v1.*.sandbox.trajectory", "core", "client", ("auth",), "TrajectoryQuery",
            "what was done in a sandbox"),
    Subject("dsec.get.v1.*.job.*", "core", "client", ("auth",), "JobQuery", "list"),
    Subject("dsec.get.v1.*.image.*", "core", "client", ("auth",), "ImageQuery", "get, list"),
    Subject("dsec.get.v1.*.image.export", "core", "client", ("auth",), "ImageExport",
            "an environment as an OCI archive"),
    Subject("dsec.blob.v1.*.put.*", "core", "client", ("imagesvc",), "BlobPut",
            "bytes of an upload"),
    Subject("dsec.blob.v1.*.get.*", "core", "client", ("imagesvc",), "BlobGet",
            "bytes of an export"),
    Subject("dsec.get.v1.*.sandbox.output", "core", "client", ("auth",), "OutputQuery", "output"),
    Subject("dsec.get.v1.*.audit.list", "core", "client", ("auth",), "AuditQuery", "the record"),
    Subject("dsec.get.v1.*.audit.rules", "core", "client", ("auth",), "RulesQuery",
            "rules in force"),
    Subject("dsec.get.v1.*.audit.dry_run", "core", "client", ("auth",), "DryRunQuery",
            "rules over past events"),
    Subject("dsec.get.v1.*.audit.verify", "core", "client", ("auth",), "VerifyQuery",
            "a part of the chain"),
    Subject("dsec.get.v1.*.audit.suggest", "core", "client", ("auth",), "SuggestQuery",
            "changes of policy"),
    Subject("dsec.get.v1.*.secret.list", "core", "client", ("auth",), "IamQuery", "no values"),
    Subject("dsec.put.v1.*.secret.set.*", "core", "client", ("auth",), "SecretSet", "keep a value"),
    Subject("dsec.put.v1.*.secret.remove.*", "core", "client", ("auth",), "SecretRemove", "forget"),
    Subject("dsec.rpc.v1.auth.secrets.*", "core", "edge", ("auth",), "SecretsWanted",
            "values for a sandbox's requests"),
    Subject("dsec.rpc.v1.auth.forget", "core", "auth", ("auth",), "PrincipalsChanged",
            "to every instance: what is remembered of them holds no more"),
    Subject("dsec.get.v1.>", "core", "client", ("auth",), "IamQuery", "all other reads"),
    Subject("dsec.exec.v1.*.*.*.exec.*", "core", "client", ("edge",), "ExecRequest", "a command"),
    Subject("dsec.exec.v1.*.*.*.connect.*", "core", "client", ("edge",), "ConnectRequest",
            "reach a port"),
    Subject("dsec.exec.v1.*.*.*.pack.*", "core", "imagesvc", ("edge",), "PackRequest",
            "make a layer of what it changed"),
    Subject("dsec.exec.v1.*.*.*.info.*", "core", "client", ("edge",), "InfoRequest", "live facts"),
    Subject("dsec.exec.v1.*.*.*.pause.*", "core", "client", ("edge",), "StandingRequest", "halt"),
    Subject("dsec.exec.v1.*.*.*.resume.*", "core", "client", ("edge",), "StandingRequest", "go on"),
    Subject("dsec.exec.v1.*.*.*.policy.*", "core", "client", ("edge",), "PolicyRequest",
            "other rules for a running sandbox"),
    Subject("dsec.exec.v1.*.*.*.verify.*", "core", "client", ("edge",), "LeaseRequest",
            "a verifier's lease"),
    Subject("dsec.exec.v1.*.*.*.trajectory.*", "core", "client", ("edge",), "TrajectoryRequest",
            "what was done in it"),
    Subject("dsec.exec.v1.*.*.*.note.*", "core", "client", ("edge",), "NoteRequest",
            "what a script was told"),
    Subject("dsec.exec.v1.*.*.*.*.*", "core", "client", ("edge",), "FileRequest",
            "file verbs; io carries frames"),
    Subject("dsec.out.v1.*.*.*.*", "core", "edge", ("client",), "ExecReply",
            "frames and the final reply of one operation"),
    Subject("dsec.cmd.v1.sandbox.create.*", "jetstream", "auth", ("scheduler",),
            "SandboxCreate", "admitted creates"),
    Subject("dsec.cmd.v1.sandbox.op.*", "jetstream", "auth", ("scheduler",), "SandboxOp",
            "admitted operations"),
    Subject("dsec.cmd.v1.job.*.*", "jetstream", "auth", ("scheduler",), "JobCommand",
            "admitted leases"),
    Subject("dsec.cmd.v1.node.op.*", "jetstream", "auth", ("scheduler",), "NodeCommand",
            "admitted node commands"),
    Subject("dsec.cmd.v1.image.*.*", "jetstream", "auth", ("imagesvc",), "ImageCommand",
            "admitted image requests"),
    Subject("dsec.cmd.v1.audit.report.*", "jetstream", "auth", ("audit",), "AuditReport",
            "admitted reports of graders"),
    Subject("dsec.cmd.v1.edge.start.*", "jetstream", "scheduler", ("edge",), "EdgeStart",
            "starts placed on a node"),
    Subject("dsec.cmd.v1.edge.*.*", "jetstream", "scheduler", ("edge",), "EdgeOp",
            "stop, pause, resume, set_timeout on a node"),
    Subject("dsec.evt.v1.edge.sandbox.*", "jetstream", "edge", ("scheduler",),
            "EdgeObservations", "what an edge saw"),
    Subject("dsec.evt.v1.sandbox.*.*.*", "jetstream", "scheduler", ("client", "auth"),
            "SandboxEvent", "a sandbox changed state"),
    Subject("dsec.evt.v1.*.access.*", "jetstream", "edge|auth|scheduler", ("audit",),
            "AccessRecords", "every verb, once"),
    Subject("dsec.evt.v1.imagesvc.image.*", "jetstream", "imagesvc", ("scheduler",),
            "ImageChanged", "a name means something else now"),
    Subject("dsec.evt.v1.burst.plan.*", "jetstream", "burst", ("scheduler", "client"),
            "BurstPlan", "utilisation and plan"),
    Subject("dsec.sec.v1.*.*.*", "jetstream", "edge", ("audit",), "Violations",
            "denials in sandboxes"),
    Subject("dsec.trj.v1.*", "jetstream", "edge", ("audit",), "TrajectoryRecords",
            "operations and their results"),
    Subject("dsec.audit.v1.*.*.*", "jetstream", "audit", ("client",), "Finding",
            "findings for the security team"),
    Subject("dsec.rpc.v1.scheduler.join.*", "core", "edge", ("scheduler",), "JoinRequest",
            "an edge starts"),
    Subject("dsec.rpc.v1.scheduler.sandboxes", "core", "auth|audit", ("scheduler",),
            "SandboxQuery", "forwarded reads; whose a sandbox is"),
    Subject("dsec.rpc.v1.scheduler.ended", "core", "auth", ("scheduler",), "EndedQuery",
            "what is over, before a quota refuses"),
    Subject("dsec.rpc.v1.scheduler.jobs", "core", "auth", ("scheduler",), "JobQuery",
            "forwarded reads"),
    Subject("dsec.rpc.v1.scheduler.nodes", "core", "auth|burst", ("scheduler",), "IamQuery",
            "the fleet"),
    Subject("dsec.rpc.v1.scheduler.environments", "core", "imagesvc", ("scheduler",),
            "EnvironmentsQuery", "what was started how often"),
    Subject("dsec.rpc.v1.imagesvc.hot_set", "core", "auth", ("imagesvc",), "HotSetQuery",
            "forwarded questions for the hot set"),
    Subject("dsec.evt.v1.edge.access_profile.*", "jetstream", "edge", ("imagesvc",),
            "LayerAccesses", "what of layers was read"),
    Subject("dsec.get.v1.*.image.hot_set", "core", "client", ("auth",), "HotSetQuery",
            "layers that serve most sandboxes"),
    Subject("dsec.rpc.v1.scheduler.layers", "core", "imagesvc", ("scheduler",),
            "LayerUseQuery", "layers of living sandboxes"),
    Subject("dsec.rpc.v1.scheduler.origin", "core", "imagesvc", ("scheduler",),
            "OriginQuery", "where a sandbox is and what it was made of"),
    Subject("dsec.rpc.v1.imagesvc.resolve", "core", "scheduler", ("imagesvc",),
            "ResolveRequest", "names to layers"),
    Subject("dsec.rpc.v1.imagesvc.images", "core", "auth", ("imagesvc",), "ImageQuery",
            "forwarded reads"),
    Subject("dsec.rpc.v1.imagesvc.export", "core", "auth", ("imagesvc",), "ImageExport",
            "forwarded exports"),
    Subject("dsec.rpc.v1.audit.list", "core", "auth", ("audit",), "AuditQuery",
            "forwarded reads; likewise rules, dry_run, verify, suggest"),
    Subject("dsec.rpc.v1.audit.trajectory", "core", "auth", ("audit",), "TrajectoryQuery",
            "forwarded reads; likewise outputs (OutputQuery)"),
    Subject("dsec.rpc.v1.audit.output.*", "core", "edge", ("audit",), "OutputPiece", "long output"),
    Subject("dsec.hb.v1.*", "core", "edge", ("scheduler", "burst"), "Heartbeat", "every second"),
    Subject("dsec.dlq.v1.*", "jetstream", "any service", ("operator",), "DeadLetter",
            "given-up messages with their cause"),
)  # fmt: skip
