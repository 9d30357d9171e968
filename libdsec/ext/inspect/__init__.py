"""dsec as a sandbox of UK AISI's Inspect: ``sandbox=("dsec", "dsec.yaml")``.

Installing ``libdsec[inspect]`` registers it by the entry point group ``inspect_ai``.
The connection comes from ``DSEC_URL``, ``DSEC_API_KEY`` and ``DSEC_PROJECT`` or the
SDK's file, as everywhere.
"""

from __future__ import annotations

from libdsec.ext.inspect.config import DSecSandboxConfig, SandboxConfig
from libdsec.ext.inspect.environment import DSecSandboxEnvironment

__all__ = ["DSecSandboxConfig", "DSecSandboxEnvironment", "SandboxConfig"]
