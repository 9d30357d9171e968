"""The map of the bus as an AsyncAPI 3.0 document.

Owns: the document. Does not own: the map (:mod:`schemas.subjects`). Streams and
durables have no place in AsyncAPI's NATS binding: they are ``x-`` extensions.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from schemas.registry import MESSAGES, full_name
from schemas.streams import DURABLES, EDGE_DURABLE, STREAMS
from schemas.subjects import SUBJECTS, Subject


def document() -> dict[str, Any]:
    """AsyncAPI 3.0.0 as plain data."""
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "dsec",
            "version": "1",
            "description": "Every subject, message, stream and durable consumer of dsec.",
            "license": {"name": "Apache-2.0"},
        },
        "defaultContentType": "application/json",
        "channels": {_channel_id(s): _channel(s) for s in SUBJECTS},
        "operations": _operations(),
        "components": {"messages": {full_name(n): _message(n) for n in MESSAGES}},
        "x-streams": {s.name: asdict(s) for s in STREAMS},
        "x-durables": {d.name: asdict(d) for d in (*DURABLES, EDGE_DURABLE)},
    }


def _channel_id(subject: Subject) -> str:
    return subject.pattern.replace("*", "any").replace(">", "all")


def _channel(subject: Subject) -> dict[str, Any]:
    name = full_name(subject.message)
    channel: dict[str, Any] = {
        "address": subject.pattern,
        "description": subject.doc,
        "messages": {name: {"$ref": f"#/components/messages/{name}"}},
        "bindings": {"nats": {}},
        "x-transport": subject.transport,
        "x-sender": subject.sender,
        "x-receivers": list(subject.receivers),
    }
    stream = _stream_of(subject)
    if stream:
        channel["x-stream"] = stream
    return channel


def _stream_of(subject: Subject) -> str | None:
    if subject.transport != "jetstream":
        return None
    kind = subject.pattern.split(".")[1]
    return next(s.name for s in STREAMS if s.subjects[0].split(".")[1] == kind)


def _operations() -> dict[str, Any]:
    operations: dict[str, Any] = {}
    for subject in SUBJECTS:
        channel = {"$ref": f"#/channels/{_channel_id(subject)}"}
        for sender in subject.sender.split("|"):
            key = f"{sender.replace(' ', '_')}.send.{_channel_id(subject)}"
            operations[key] = {"action": "send", "channel": channel, "x-party": sender}
        for receiver in subject.receivers:
            key = f"{receiver}.receive.{_channel_id(subject)}"
            operations[key] = {"action": "receive", "channel": channel, "x-party": receiver}
    return operations


def _message(name: str) -> dict[str, Any]:
    full = full_name(name)
    doc = (MESSAGES[name].__doc__ or "").strip()
    return {
        "name": full,
        "summary": " ".join(doc.split("\n\n")[0].split()),
        "payload": {"$ref": f"{full}.json"},
    }
