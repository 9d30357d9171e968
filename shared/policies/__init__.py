"""Policies: a document read into rules that can be enforced. Pure.

Owns: presets, the grammar of rules, which of two rules counts. Does not own: what
enforces a rule (:mod:`services.edge.policy`). Used by auth, which refuses a bad document
before anything is stored, and by the edge.
"""

from shared.policies.model import Policy
from shared.policies.reading import is_policy_part, read
from shared.policies.tightening import EVERYTHING, carried, merged, tightened

__all__ = ["EVERYTHING", "Policy", "carried", "is_policy_part", "merged", "read", "tightened"]
