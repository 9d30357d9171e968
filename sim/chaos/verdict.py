"""What must hold after a run under faults, judged beside the same run in peace. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sim.chaos.run import Account, same
from sim.chaos.trace import Trace

SHOWN = 8
"""Examples of what does not hold."""


@dataclass(frozen=True)
class Check:
    """One thing that must hold, and what speaks against it."""

    name: str
    against: Sequence[str]

    @property
    def ok(self) -> bool:
        """Whether it holds."""
        return not self.against


def checks(
    trace: Trace,
    peace: Account,
    faulted: Account,
    *,
    happened: Sequence[str],
    left: Sequence[str],
) -> list[Check]:
    """All checks. ``happened``: the kinds of faults that met the run; ``left``: what was
    left behind."""
    names = [rollout.name for rollout in trace.rollouts]
    return [
        Check("no rollout was lost", _lost(names, faulted)),
        Check("no rollout was lost in peace", _lost(names, peace)),
        Check("every command ran once", _runs(faulted)),
        Check("every command ran once in peace", _runs(peace)),
        Check("sessions kept their state", _kept(faulted)),
        Check("rewards are those of the run in peace", _rewards(names, peace, faulted)),
        Check("results are those of the run in peace", _results(peace, faulted)),
        Check("no result changed when it was asked for again", faulted.changed),
        Check("nothing is left behind", left),
        Check("every fault happened", _missing(trace, happened)),
    ]


def _lost(names: Sequence[str], account: Account) -> list[str]:
    lost = [f"{n}: {account.lost.get(n, 'no end')}" for n in names if n not in account.rollouts]
    masked = [f"{n}: no verdict" for n, r in account.rollouts.items() if r["reward"] is None]
    return lost + masked


def _runs(account: Account) -> list[str]:
    return [
        f"{name}: {kind} {found[kind]}"
        for name, found in account.rollouts.items()
        for kind in ("missing", "repeated")
        if found[kind]
    ]


def _kept(account: Account) -> list[str]:
    return [name for name, found in account.rollouts.items() if not found["session_kept"]]


def _rewards(names: Sequence[str], peace: Account, faulted: Account) -> list[str]:
    pairs = {n: (_reward(peace, n), _reward(faulted, n)) for n in names}
    return [f"{n}: {there} in peace, {here} here" for n, (there, here) in pairs.items()
            if there != here]  # fmt: skip


def _reward(account: Account, name: str) -> float | None:
    found = account.rollouts.get(name)
    return found["reward"] if found else None


def _results(peace: Account, faulted: Account) -> list[str]:
    both = peace.digests.keys() & faulted.digests.keys()
    pairs = {key: (peace.digests[key], faulted.digests[key]) for key in sorted(both)}
    return [f"{name}/{step}" for (name, step), pair in pairs.items() if not same(*pair)]


def _missing(trace: Trace, happened: Sequence[str]) -> list[str]:
    faults = trace.faults
    wanted = [f"killed {kill.target}" for kill in faults.processes]
    wanted += ["job paused", "job resumed"] if faults.pauses else []
    missing = [what for what in wanted if what not in happened]
    killed = happened.count("trainer killed")
    if killed < len(faults.trainers):
        missing.append(f"{killed} of {len(faults.trainers)} trainers killed")
    return missing


def figures(trace: Trace, account: Account) -> dict[str, Any]:
    """Numbers of one run: times in milliseconds but for ``wall_s``."""
    rewards = [found["reward"] for found in account.rollouts.values()]
    replayed = sum(account.replayed_ms)
    return {
        "rollouts": len(account.rollouts),
        "solved": rewards.count(1.0),
        "steps": account.steps,
        "commands": account.counts["commands"],
        "steps_repeated": len(account.replayed_ms),
        "repeat_ms_per_100": round(replayed / len(account.replayed_ms) * 100, 1)
        if account.replayed_ms else None,
        "create_ms_p50": _share(account.made_ms, 0.5),
        "exec_over_ms_p50": _share(account.over_ms, 0.5),
        "exec_over_ms_p99": _share(account.over_ms, 0.99),
        "trainer_restarts": account.counts["trainer_restarts"],
        "retries": dict(account.retries),
        "masked": dict(account.masked),
        "wall_s": round(account.wall_s, 1),
        "commands_per_s": round(account.counts["commands"] / max(account.wall_s, 0.001), 1),
    }  # fmt: skip


def _share(samples: Sequence[float], share: float) -> float | None:
    if not samples:
        return None
    return round(sorted(samples)[max(0, math.ceil(share * len(samples)) - 1)], 1)


def summary(found: Sequence[Check], report: Mapping[str, Any]) -> str:
    """The report for a reader."""
    lines = [f"seed {report['seed']}, scale {report['scale']}"]
    for name in ("peace", "faults"):
        facts = ", ".join(f"{k} {v}" for k, v in report[name].items() if v not in ({}, None))
        lines.append(f"{name}: {facts}")
    for check in found:
        lines.append(f"  {'ok ' if check.ok else 'NO '} {check.name}")
        lines += [f"       {text}" for text in check.against[:SHOWN]]
        if len(check.against) > SHOWN:
            lines.append(f"       and {len(check.against) - SHOWN} more")
    return "\n".join(lines)
