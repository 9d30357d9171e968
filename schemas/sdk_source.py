"""The SDK's wire types: source text picked out of the schemas, standing alone.

Owns: which definitions the SDK needs and how their source is put together. Does
not own: writing the file (:mod:`schemas.export`).
"""

from __future__ import annotations

import ast
import builtins
import inspect
from dataclasses import dataclass, field

from schemas import subjects
from schemas.registry import MODULES

WANTED = (
    "VERSION", "HEADER_REPLY", "HEADER_TRACE", "HEADER_FRAME", "HEADER_OP", "HEADER_OFFSET",
    "HEADER_AGAIN", "HEADER_HAVE", "HEADER_LEASE", "HEADER_SOURCE", "plain_name", "whole_name",
    "encode", "decode", "misfit", "BadMessage", "ErrorReply", "Ok", "WireError",
    "SandboxSpec", "CreateRequest", "CreateReply", "ItemResult", "MAX_BATCH",
    "SandboxOpRequest", "OpReply", "JobRequest", "JobReply", "JobQuery", "JobPage", "JobInfo",
    "SandboxEvent", "SandboxInfo", "SandboxQuery", "SandboxPage",
    "CHUNK_BYTES", "WINDOW_BYTES", "INLINE_BYTES", "KEEPALIVE_S", "ExecRequest", "ExecReply",
    "CONNECT_WINDOW_BYTES", "ConnectRequest", "ConnectReply",
    "FileRequest", "FileReply", "FileEntry", "FileEvent", "InfoRequest", "InfoReply",
    "PolicyRequest", "PolicyReply", "StandingRequest", "StandingReply",
    "LEASE_MAX_S", "LeaseRequest", "LeaseReply",
    "TRAJECTORY_PAGE", "TrajectoryRequest", "TrajectoryQuery", "TrajectoryPage",
    "TrajectoryRecord", "WholeOutput", "OutputQuery", "OutputPage",
    "OUTPUT_PIECE_BYTES", "NOTE_BYTES", "NoteRequest", "NoteReply",
    "Limits", "Amounts", "ProjectCreate", "ProjectDelete", "ProjectInfo", "KeyCreate",
    "KeyDelete", "KeyInfo", "GrantCreate", "GrantDelete", "QuotaCreate", "QuotaInfo",
    "PolicyCreate", "PolicyDelete", "PolicyInfo", "IamQuery", "IamReply",
    "NodeCommand", "NodeInfo", "NodeList", "Resources",
    "BackendStatus", "FeatureReport", "ImageCreate", "ImageDelete",
    "ImageTag", "ImageExport", "ImageInfo", "ImageReply", "ImageQuery", "Blob", "BlobPut",
    "HotSetQuery", "HotSet",
    "BlobGet", "BlobState", "BlobPiece", "BLOB_CHUNK_BYTES", "BLOB_WINDOW", "blob",
    "SnapshotCreate", "LayerProvenance", "Removed",
    "AuditQuery", "AuditPage", "AuditEntry", "Finding",
    "RuleInfo", "RulesQuery", "RulesReply", "DryRunQuery", "DryRunReply", "VerifyQuery",
    "VerifyReply", "SuggestQuery", "Suggestion", "SuggestReply", "GradingObservation",
    "SandboxReport", "SecretBinding", "SecretSet", "SecretRemove", "SecretInfo", "SecretReply",
    "req", "get", "put", "exec_", "out", "inbox_prefix", "evt_sandbox", "audit",
)  # fmt: skip

HEADER = '''"""Wire types, constants and subjects of dsec.

Generated from schemas/ by `python -m schemas.export`: do not edit.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar, get_type_hints

import msgspec
from msgspec import Meta
'''


@dataclass
class _Definition:
    """One top-level definition: its source and the names it needs."""

    text: str
    order: tuple[int, int]
    needs: set[str] = field(default_factory=set)


def _defined(node: ast.stmt) -> str | None:
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return node.name
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return node.target.id
    return None


def _collect() -> dict[str, _Definition]:
    found: dict[str, _Definition] = {}
    for number, module in enumerate((*MODULES, subjects)):
        lines = inspect.getsource(module).splitlines()
        body = ast.parse("\n".join(lines)).body
        for index, node in enumerate(body):
            name = _defined(node)
            if name is None:
                continue
            last = _end(body, index)
            text = "\n".join(lines[node.lineno - 1 : last])
            needs = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} - {name}
            if name in found and name in WANTED:
                raise ValueError(f"{name} is defined twice, the SDK cannot tell which")
            found.setdefault(name, _Definition(text, (number, node.lineno), needs))
    return found


def _end(body: list[ast.stmt], index: int) -> int:
    """The last line of a definition with the docstring that may follow it."""
    after = body[index + 1] if index + 1 < len(body) else None
    if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
        return after.end_lineno or after.lineno
    return body[index].end_lineno or body[index].lineno


def source() -> str:
    """The text of ``libdsec/_wire.py``. Raises ``ValueError`` on ambiguous names."""
    known = _collect()
    missing = [name for name in WANTED if name not in known]
    if missing:
        raise ValueError(f"not defined in schemas: {', '.join(missing)}")
    taken: set[str] = set()
    queue = list(WANTED)
    while queue:
        name = queue.pop()
        if name in taken or name not in known or hasattr(builtins, name):
            continue
        taken.add(name)
        queue += known[name].needs
    chosen = sorted((known[name] for name in taken), key=lambda d: d.order)
    blocks = [HEADER, *(d.text for d in chosen)]
    return "\n\n".join(b.strip("\n") for b in blocks) + "\n"
