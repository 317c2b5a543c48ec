"""The ``security`` section: who may call, how much, and what is encrypted."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from paceline.cluster.config_errors import ConflictError
from paceline.cluster.config_section import Count, Name, OptionalName, Section

Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class RateLimit(Section):
    """A token bucket: `requests_per_second` on average, `burst` at once."""

    requests_per_second: Rate
    """Requests that are let in on average; one of several choices counts as that many."""
    burst: Count = 10
    """Requests that may come at once after a pause."""


class InternalTls(Section):
    """Mutual TLS on the streams between gateways, targets and drafts. The files are PEM and must be on every
    node. They are read again when they change, so that certificates can be renewed without a restart."""

    certificate: Name
    """Path of this node's certificate, and of what it was signed with up to `ca`."""
    private_key: Name
    """Path of the certificate's key."""
    ca: Name
    """Path of the certificates that peers must be signed by."""
    server_name: OptionalName = "paceline"
    """Name that the certificates of targets must be issued for (a DNS name among the subject's alternative
    names); null = the address of the target's node."""


class SecurityConfig(Section):
    """Who may call, how much, and what is encrypted."""

    tokens_file: OptionalName = None
    """Path of a file of bearer tokens, on every node with a gateway: one a line, or `NAME TOKEN`, `#` begins
    a comment. Every call must then carry one of them as `authorization: Bearer TOKEN`. The file is read
    again when it changes; null = no token is asked for."""
    max_request_bytes: Annotated[int, Field(ge=1024, le=1 << 30)] = 16 * 1024 * 1024
    """Largest request; a larger one is refused as INVALID_ARGUMENT."""
    rate_limit: RateLimit | None = None
    """What one gateway lets in from all callers together; null = no limit."""
    rate_limit_per_token: RateLimit | None = None
    """What one gateway lets in for each name (or token without a name) in `tokens_file`; null = no limit."""
    internal_tls: InternalTls | None = None
    """Mutual TLS between the pools; null = their streams are not encrypted."""
    allow_pickled_weights: bool = False
    """Whether weights may be loaded from pickle files (`pytorch_model.bin`) as well, where a model has no
    safetensors or GGUF. Unpickling can run code."""

    @model_validator(mode="after")
    def _tokens_to_count(self) -> SecurityConfig:
        if self.rate_limit_per_token is not None and self.tokens_file is None:
            raise ConflictError(
                "rate_limit_per_token",
                "needs tokens to tell callers apart — set tokens_file, or use rate_limit",
            )
        return self
