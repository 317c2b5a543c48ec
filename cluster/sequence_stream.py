"""How a request reads its sequence."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from paceline.cluster.sequence import CommittedTokens, Sequence, SequenceResult


class SequenceStream:
    """The tokens of one sequence as they are committed.

    Iterate for ``CommittedTokens``: each item holds everything committed since the item before, so that a
    slow reader makes items longer, not more numerous, and memory is bounded by ``max_tokens``. When the
    iteration is over, ``result`` says how the sequence ended; a failure is raised, after all tokens that
    were committed before it.

    ``close`` (or the end of a ``with`` block) frees the sequence on its target, always and at once: also
    when the reader is cancelled. It never waits.

    Raises (from the iteration):
        RequestError, InvalidArgumentError: see ``cluster.errors``.
    """

    def __init__(
        self,
        sequence: Sequence,
        stop: Callable[[Sequence], Awaitable[SequenceResult]],
        abandon: Callable[[Sequence], None],
    ) -> None:
        self._sequence = sequence
        self._stop = stop
        self._abandon = abandon
        self._num_read = 0

    def __enter__(self) -> SequenceStream:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __aiter__(self) -> SequenceStream:
        return self

    async def __anext__(self) -> CommittedTokens:
        sequence = self._sequence
        while True:
            if self._num_read < len(sequence.committed):
                start, self._num_read = self._num_read, len(sequence.committed)
                return sequence.read(start)
            if sequence.error is not None:
                raise sequence.error
            if sequence.result is not None:
                raise StopAsyncIteration
            await sequence.wait()

    @property
    def sequence_id(self) -> str:
        return self._sequence.sequence_id

    @property
    def ended(self) -> bool:
        """The sequence has ended well and everything has been read."""
        return self._sequence.result is not None and self._num_read == len(self._sequence.committed)

    @property
    def result(self) -> SequenceResult:
        """How the sequence ended. Raises: RuntimeError before it has."""
        if self._sequence.result is None:
            raise RuntimeError("the sequence has not ended")
        return self._sequence.result

    async def stop(self) -> SequenceResult:
        """End the sequence here, as by a stop string; what was not read is dropped.

        Waits for the target's statistics, for a bounded time.
        """
        return await self._stop(self._sequence)

    def close(self) -> None:
        self._abandon(self._sequence)
