from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from paceline.actors.engine.messages import Committed
from paceline.actors.engine.parameters import StoppingParams
from paceline.actors.engine.stopping import find_stop
from paceline.cluster.sequence import Arrival, Sequence
from tests.cluster.scripted import checked


@given(
    chunks=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=8),
    overlap=st.integers(0, 2),
    max_tokens=st.integers(1, 12),
    min_tokens=st.integers(0, 6),
)
def test_a_sequence_ends_where_a_scan_of_all_its_tokens_says(
    chunks: list[list[int]], overlap: int, max_tokens: int, min_tokens: int
) -> None:
    """However its tokens come: in what pieces, some of them twice, and also after its end."""
    stopping = StoppingParams(
        max_tokens=max_tokens, min_tokens=min(min_tokens, max_tokens), stop_token_ids=frozenset({0})
    )
    request = replace(checked(), stopping=stopping)
    sequence = Sequence("s", request)
    assert sequence.find_end() is None
    for chunk in chunks:
        known = sequence.committed[max(0, len(sequence.committed) - overlap) :]
        token_ids = (*known, *chunk)
        base = sequence.num_tokens - len(known)
        before = list(sequence.committed)
        arrival = sequence.apply(Committed("s", 0, base, token_ids, (True,) * len(token_ids)))
        assert sequence.committed == before + (chunk if arrival is Arrival.APPLIED else [])
        whole = find_stop(sequence.committed, 0, stopping).reason if sequence.committed else None
        assert sequence.find_end() is whole
