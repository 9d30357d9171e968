"""What audit is configured with."""

from __future__ import annotations

from pathlib import Path

from services.audit import responses, rulebook
from services.audit.responses import Choice
from services.audit.rulebook import Rule
from shared.errors import InvalidRequest
from shared.settings import Common

RULES = Path(__file__).parent / "rules"


class Settings(Common, kw_only=True):
    """``pg_dsn``: its own role's. ``rows_per_transaction`` bounds one insertion.
    ``audit_rules``: a folder with further rules files. ``audit_responses``: a file that
    says what follows which finding. ``root_project``: whose readers look after nodes.
    ``audit_keep_s``: how long owners and windows are kept that nothing was heard of.
    Of the trajectory log what is older than ``trajectory_keep_s`` goes, and the oldest where
    it is more than ``trajectory_max_bytes``; it is looked at every ``trajectory_look_s``."""

    pg_dsn: str
    rows_per_transaction: int = 2_000
    audit_rules: str | None = None
    audit_responses: str | None = None
    root_project: str = "root"
    audit_keep_s: float = 40 * 86_400.0
    audit_window_keep_s: float = 2 * 86_400.0
    trajectory_keep_s: float = 7 * 86_400.0
    trajectory_max_bytes: int = 16 << 30
    trajectory_look_s: float = 300.0

    def rules(self) -> list[Rule]:
        """The rules that ship and the operator's. Raises ``InvalidRequest``."""
        folders = [RULES, *([Path(self.audit_rules)] if self.audit_rules else [])]
        files: dict[str, str] = {}
        for folder in folders:
            found = sorted(folder.glob("*.toml"))
            if not found:
                raise InvalidRequest(f"no rules in {folder}", field="audit_rules")
            files |= {str(path): _text(path, "audit_rules") for path in found}
        return rulebook.collect(files)

    def choices(self) -> list[Choice]:
        """The operator's responses. Raises ``InvalidRequest``."""
        if self.audit_responses is None:
            return []
        return responses.read(_text(Path(self.audit_responses), "audit_responses"))


def _text(path: Path, field: str) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as exc:
        raise InvalidRequest(f"{path}: {exc}", field=field) from exc
