"""Settings of auth: every bound and every secret it takes. Owns the names only."""

from __future__ import annotations

from shared.settings import Common


class Settings(Common, kw_only=True):
    """From ``DSEC_<FIELD>``; a secret may come as a file named by ``DSEC_<FIELD>_FILE``.

    ``auth_account_seed`` is the account nkey seed (``SA…``) whose public key is the
    ``issuer`` of the server's auth callout. ``sys_user`` and ``sys_password`` belong to
    the system account; without them changed grants only bite at the next connect.
    OIDC is off while ``oidc_issuer`` is empty.
    """

    pg_dsn: str
    auth_account_seed: str
    auth_account: str = "DSEC"
    sys_user: str | None = None
    sys_password: str | None = None

    auth_secret_keys: str | None = None
    """Keys under which secrets lie in the database, see :mod:`services.auth.sealing`;
    without one no secret is kept."""

    auth_session_s: float = 3_600.0
    """A connection's life; the SDK reconnects and gets its permissions anew."""
    auth_last_known_s: float = 900.0
    """How long an identity that was read serves while the database is away. So long at most,
    and then alone, a revoked key opens connections at an instance that the bus had lost just
    when another one was told."""
    auth_max_subjects: int = 20_000
    """Entries in one user's permissions (about 60 bytes each)."""
    auth_connects: int = 64
    """Connection requests judged at a time."""
    auth_reads: int = 256
    """Reads answered at a time."""

    auth_default_cores: float = 1.0
    """Charged where a spec has neither ``cpu_cores_request`` nor ``cpu_cores_limit``."""
    auth_default_memory_mb: int = 512
    """Charged where a spec has neither ``memory_request_mb`` nor ``memory_limit_mb``."""
    auth_rate_burst_s: float = 1.0
    """Seconds of ``creations_per_s`` that may be saved up."""
    auth_max_request_bytes: int = 7 * 1024 * 1024
    auth_max_depth: int = 32
    """Levels of projects."""
    auth_request_keep_s: float = 30 * 86_400.0
    """How long a request id is remembered."""
    auth_prune_s: float = 600.0
    """Between removals of what is past its use."""
    auth_prune_rows: int = 1_000
    """Rows of one of their transactions."""
    auth_reconcile_s: float = 60.0
    """Between two looks at old charges."""
    auth_charge_check_s: float = 600.0
    """Age at which a charge is compared with its sandbox's state."""
    auth_charge_unknown_s: float = 25 * 3_600.0
    """Age at which a charge goes whose sandbox the scheduler never heard of: longer
    than a command may wait in its stream."""

    oidc_issuer: str | None = None
    oidc_audience: str | None = None
    oidc_jwks: str | None = None
    """URL or path of the key set; default: ``<issuer>/.well-known/jwks.json``."""
    oidc_algorithms: str = "RS256,ES256,PS256,EdDSA"
    oidc_projects_claim: str = "dsec_projects"
    """A claim that lists project ids, or maps them to lists of grants."""
    oidc_grants: str = "sandbox.*,image.get,image.list,quota.get,project.list"
    """Grants in projects that the claim lists without grants of their own."""
