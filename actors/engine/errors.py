"""Errors that cross the engine's border."""


class PacelineError(Exception):
    """Base of all errors that Paceline raises on purpose. The text is fit for a user's eyes."""


class InvalidArgumentError(PacelineError):
    """A request is wrong. ``field`` is the dotted path of the field in the public contract."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


class ConstraintError(PacelineError):
    """A sequence's tokens do not satisfy the constraint that its request names."""


class ModelError(PacelineError):
    """A model cannot be found, read or served. The text names the remedy."""


class ShardGroupError(PacelineError):
    """A rank of a group is lost or late, or cannot join, or a step broke off on some ranks only: the group
    cannot go on, and no step of its engine can."""


class IncompatibleDraftError(PacelineError):
    """A draft cannot propose for this target, for example because their token maps differ."""


class QueueFullError(PacelineError):
    """The target takes no further request at present."""


class NonFiniteLogitsError(PacelineError):
    """The model gave rows of logits that no token can be drawn from (NaN, +inf, or nothing but −inf).

    ``rows`` are the indices of the bad rows in the batch: the sequences they belong to fail, and the others
    are sampled again without them.
    """

    def __init__(self, rows: tuple[int, ...]) -> None:
        shown = ", ".join(map(str, rows))
        super().__init__(
            f"logits of row {shown} hold NaN, +inf or no finite value; "
            "try dtype float32, or check the model's weights"
        )
        self.rows = rows
