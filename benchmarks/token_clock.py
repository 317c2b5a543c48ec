"""When the tokens of a ``transformers`` generation come."""

from __future__ import annotations

import time
from typing import Any


class TokenClock:
    """A streamer: is told of tokens as they are final. The first call brings the prompt."""

    def __init__(self) -> None:
        self.moments: list[tuple[float, int]] = []
        """(``time.perf_counter``, number of tokens) of each call."""

    def put(self, value: Any) -> None:
        self.moments.append((time.perf_counter(), value.numel()))

    def end(self) -> None:
        """Nothing is left to be told."""
