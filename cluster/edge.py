"""What stands between a caller and the gateway: a token, and limits on size and rate."""

from __future__ import annotations

from google.protobuf.message import Message
from ray.serve.grpc_util import RayServegRPCContext

from paceline.cluster.auth import Authenticator, TokenFile
from paceline.cluster.request_limits import RequestLimits
from paceline.cluster.security_config import SecurityConfig


class Edge:
    """One gateway's checks, before anything of a request is worked on.

    Raises:
        TokenFileError: the file of tokens cannot be used.
    """

    def __init__(self, security: SecurityConfig) -> None:
        self._authenticator = Authenticator(
            None if security.tokens_file is None else TokenFile(security.tokens_file)
        )
        self._limits = RequestLimits(security)

    def check(self, message: Message, context: RayServegRPCContext, num_sequences: int = 1) -> None:
        """Let a call in.

        Args:
            num_sequences: what it counts as; 0 = for nothing: asking for the model never comes too soon.

        Raises:
            AuthenticationError: no valid token.
            InvalidArgumentError: too large.
            RateLimitedError: too soon.
        """
        caller = self._authenticator.caller(context.invocation_metadata())
        self._limits.check_size(message)
        if num_sequences:
            self._limits.admit(None if caller is None else caller.name, num_sequences)
