"""Presets: policies by name. Pure.

Owns: what each holds. A document's own rules come over those of its preset.
"""

from __future__ import annotations

from collections.abc import Mapping

from schemas.policy import Files, PolicyDocument, Processes
from shared.policies.model import DENIABLE

SYSTEM_TREES = ["/usr?", "/bin?", "/sbin?", "/lib?", "/lib32?", "/lib64?", "/libx32?", "/boot?"]
KERNEL_PAGES = ["/proc/kpagecgroup?", "/proc/kpagecount?", "/proc/kpageflags?"]
"""Reading them through is an accident waiting in every ``grep -r /``."""

_BUILDING = [name for name in DENIABLE if name != "ptrace"]  # debuggers and tracers build things

PRESETS: Mapping[str, PolicyDocument] = {
    "locked": PolicyDocument(
        files=Files(read_only=SYSTEM_TREES, hidden=KERNEL_PAGES),
        processes=Processes(deny=list(DENIABLE)),
    ),
    "research": PolicyDocument(
        network={"pypi": True, "npm": True, "go-proxy": True},
        files=Files(hidden=KERNEL_PAGES),
        processes=Processes(deny=list(DENIABLE)),
    ),
    "build": PolicyDocument(
        network={"pypi": True, "npm": True, "go-proxy": True, "github": True},
        files=Files(hidden=KERNEL_PAGES),
        processes=Processes(deny=_BUILDING),
    ),
}
