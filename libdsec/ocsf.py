"""Entries of the audit record in the form of the Open Cybersecurity Schema Framework.

Owns: which class an entry is and where its facts go. Does not own: fetching entries.
Findings are Detection Findings (2004), verbs API Activity (6003), violations Network,
DNS, File System, Kernel or Process Activity (4001, 4003, 1001, 1003, 1007). What has no
place of its own is in ``unmapped``; nothing is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from libdsec._wire import AuditEntry

VERSION = "1.3.0"
SEVERITIES = {"info": 1, "low": 2, "medium": 3, "high": 4, "critical": 5}
OTHER = 99
FINDING, API, NETWORK, DNS, FILE, KERNEL, PROCESS = 2004, 6003, 4001, 4003, 1001, 1003, 1007
_CATEGORY = {FINDING: 2, API: 6, NETWORK: 4, DNS: 4, FILE: 1, KERNEL: 1, PROCESS: 1}
_SOURCES = {
    "bpf_net": NETWORK, "sni": NETWORK, "dns": DNS, "bpf_lsm": FILE, "apparmor": FILE,
    "landlock": FILE, "observer": FILE, "seccomp": KERNEL,
}  # fmt: skip
_API_ACTIVITY = {"create": 1, "open": 1, "get": 2, "list": 2, "set_timeout": 3, "delete": 4}
_FILE_ACTIVITY = {"create": 1, "open": 2, "read": 2, "write": 3, "remove": 4, "rename": 5}
_DENIED = {"action_id": 2, "disposition_id": 2}
_OBSERVED = {"action_id": 3, "disposition_id": 17}


def event(entry: AuditEntry) -> dict[str, Any]:
    """One entry as an event: JSON values only."""
    record = entry.record
    make = {"finding": _finding, "access": _access}.get(entry.kind, _violation)
    class_, activity, facts = make(record)
    at = round(float(record.get("at") or 0) * 1000)
    return {
        "class_uid": class_,
        "category_uid": _CATEGORY[class_],
        "activity_id": activity,
        "type_uid": class_ * 100 + activity,
        "time": at,
        "metadata": {
            "version": VERSION,
            "uid": entry.id or str(entry.seq),
            "sequence": entry.seq,
            "product": {"name": "dsec", "vendor_name": "dsec"},
            "tenant_uid": record.get("project", ""),
        },
        **facts,
        "unmapped": {**record, "kind": entry.kind, "hash": entry.hash},
    }


def _finding(record: Mapping[str, Any]) -> tuple[int, int, dict[str, Any]]:
    severity = SEVERITIES.get(record.get("severity", ""), OTHER)
    info: dict[str, Any] = {
        "uid": record.get("id", ""), "title": record.get("title") or record.get("rule", ""),
        "desc": record.get("explanation", ""), "types": [record.get("rule", "")],
        "related_events": [{"uid": uid} for uid in record.get("evidence", ())],
    }  # fmt: skip
    if record.get("first_at"):
        info["first_seen_time"] = round(float(record["first_at"]) * 1000)
    facts: dict[str, Any] = {
        "severity_id": severity, "status_id": 1, "finding_info": info,
        "count": record.get("total", 1),
        "confidence_score": round(float(record.get("confidence", 1.0)) * 100),
        "resources": [_sandbox(record)],
    }  # fmt: skip
    return FINDING, 1, facts


def _access(record: Mapping[str, Any]) -> tuple[int, int, dict[str, Any]]:
    verb = str(record.get("verb", ""))
    ok = record.get("outcome") == "ok"
    facts = {
        "severity_id": 1, "status_id": 1 if ok else 2, "status_detail": record.get("outcome", ""),
        "api": {"operation": verb, "service": {"name": record.get("source", "")},
                "request": {"uid": record.get("request_id", "")}},
        "actor": {"user": {"uid": record.get("principal", "")}},
        "src_endpoint": {"name": "unknown"}, "resources": [{"uid": record.get("target", "")}],
    }  # fmt: skip
    return API, _API_ACTIVITY.get(verb.rpartition(".")[2], OTHER), facts


def _violation(record: Mapping[str, Any]) -> tuple[int, int, dict[str, Any]]:
    class_ = _SOURCES.get(str(record.get("source")), PROCESS)
    actor, to = record.get("actor") or {}, record.get("destination") or {}
    process = {"name": actor.get("comm", ""), "pid": actor.get("pid", 0)}
    facts: dict[str, Any] = {
        "severity_id": 2, "count": record.get("count", 1), "message": record.get("rule", ""),
        "actor": {"process": process, "user": {"uid": str(actor.get("user", ""))}},
        "device": {"hostname": record.get("node", ""), "type_id": 1},
        **(_OBSERVED if record.get("verdict") == "observed" else _DENIED),
    }  # fmt: skip
    activity = OTHER
    if class_ == NETWORK:
        activity = 5
        facts["dst_endpoint"] = {"ip": to.get("address", ""), "port": to.get("port", 0),
                                 "hostname": to.get("domain", "")}  # fmt: skip
        facts["connection_info"] = {"protocol_name": to.get("protocol", ""), "direction_id": 2}
    elif class_ == DNS:
        activity, facts["query"] = 1, {"hostname": to.get("domain", "")}
    elif class_ == FILE:
        path = str(record.get("path") or record.get("subject", ""))
        activity = _FILE_ACTIVITY.get(str(record.get("action")), OTHER)
        facts["file"] = {"path": path, "name": path.rpartition("/")[2], "type_id": 0}
    elif class_ == KERNEL:
        facts["kernel"] = {"name": record.get("syscall", ""), "type_id": 2}
    else:
        facts["process"] = process
    return class_, activity, facts


def _sandbox(record: Mapping[str, Any]) -> dict[str, Any]:
    labels = [f"{name}:{record[name]}" for name in ("job", "task", "node") if record.get(name)]
    return {
        "uid": record.get("uid") or "", "type": "sandbox", "labels": labels,
        "owner": {"uid": record.get("principal") or ""},
    }  # fmt: skip
