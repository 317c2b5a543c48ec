"""Errors that cross the engine's border."""


class PacelineError(Exception):
    """Base of all errors that Paceline raises on purpose. The text is fit for a user's eyes."""


class InvalidArgumentError(PacelineError):
    """A request is wrong. ``field`` is the dotted path of the field in the public contract."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


class ModelError(PacelineError):
    """A model cannot be found, read or served. The text names the remedy."""


class IncompatibleDraftError(PacelineError):
    """A draft cannot propose for this target, for example because their token maps differ."""


class QueueFullError(PacelineError):
    """The target takes no further request at present."""
