"""What a pull says while it works. Library code draws nothing: a caller gives a callback that may."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum


class PullStage(Enum):
    """In the order in which a pull passes through them; a stage with nothing to do is left out."""

    WAIT = "wait"
    """Another process pulls the same model."""
    VERIFY = "verify"
    """The cached files' checksums are computed; bytes."""
    DOWNLOAD = "download"
    """The parts are fetched and assembled; bytes of the GGUF file."""
    CONVERT = "convert"
    """The GGUF file is turned into safetensors; tensors."""
    SEAL = "seal"
    """The converted files' checksums are computed; bytes."""


@dataclass(frozen=True, slots=True)
class PullProgress:
    """``done`` of ``total`` in the stage's unit; ``total`` is 0 where it is not known (yet)."""

    model: str
    stage: PullStage
    done: int = 0
    total: int = 0


ProgressCallback = Callable[[PullProgress], None]


def silent(_: PullProgress) -> None:
    """The callback that shows nothing."""
