"""Log probabilities: of the right law, for every committed token, cut together with the ids."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from paceline.actors.engine.config import LogprobsMode, NgramConfig, TargetEngineConfig
from paceline.actors.engine.logprobs import token_logprobs
from paceline.actors.engine.messages import Committed, Submit, TokenLogprobs
from paceline.actors.engine.parameters import FinishReason, SamplingParams
from paceline.actors.engine.sampling import process_logits
from paceline.actors.engine.target_engine import TargetEngine
from tests.engine.fakes import HashLaw, HashRunner, Network, make_submit, processed, reference

TARGET = HashLaw()


class TestOfOneRow:
    @pytest.mark.parametrize("vocab_size", [1, 5, 1_000, 40_001])
    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    def test_is_a_log_softmax(self, vocab_size: int, dtype: type) -> None:
        rows = np.random.default_rng(vocab_size).normal(0, 5, (3, vocab_size)).astype(dtype)
        expected = torch.from_numpy(rows).double().log_softmax(1)
        tokens = [0, vocab_size - 1, vocab_size // 2]
        for row, found in enumerate(token_logprobs(rows, tokens, 20)):
            assert math.isclose(found.logprob, expected[row, tokens[row]].item(), abs_tol=1e-12)
            values, ids = expected[row].topk(min(20, vocab_size))
            assert [token_id for token_id, _ in found.top] == ids.tolist()
            assert np.allclose([value for _, value in found.top], values.numpy(), rtol=0, atol=1e-12)

    def test_equals_are_in_order_of_their_ids(self) -> None:
        rows = np.array([[1.0, 2.0, 1.0, 2.0, 1.0, 1.0]], dtype=np.float32)
        found = token_logprobs(rows, [5], 4)[0]
        assert [token_id for token_id, _ in found.top] == [1, 3, 0, 2]
        assert [token_id for token_id, _ in token_logprobs(np.zeros((1, 9)), [5], 3)[0].top] == [0, 1, 2]

    def test_what_has_no_probability_is_left_out(self) -> None:
        rows = np.array([[-np.inf, 0.0, -np.inf, 0.0]])
        found = token_logprobs(rows, [3], 3)[0]
        assert found == TokenLogprobs(-math.log(2), ((1, -math.log(2)), (3, -math.log(2))))

    def test_none_asked_for(self) -> None:
        assert token_logprobs(np.zeros((2, 4)), [0, 1], 0) == (TokenLogprobs(-math.log(4)),) * 2

    def test_extreme_logits(self) -> None:
        found = token_logprobs(np.array([[3e38, -3e38, 3e38]], dtype=np.float32), [1], 1)[0]
        assert found.top == ((0, -math.log(2)),)
        assert found.logprob < -1e38


class Listener(Network):
    """Keeps what was committed."""

    def __init__(self, target: TargetEngine) -> None:
        super().__init__(target)
        self.heard: list[Committed] = []
        take = self.gateway.take

        def keep(committed: Sequence[Committed], finished: Sequence) -> None:  # type: ignore[type-arg]
            self.heard.extend(committed)
            take(committed, finished)

        self.gateway.take = keep  # type: ignore[method-assign, assignment]


def expected_logprobs(event: Submit, token_ids: Sequence[int], mode: LogprobsMode) -> torch.Tensor:
    """Of the position after ``token_ids``, float64 [V]."""
    logits = TARGET.logits(token_ids)
    if mode is LogprobsMode.PROCESSED:
        logits = processed(logits, event.sampling, event.stopping, token_ids, event.prompt_length)
        if not event.sampling.greedy:
            weights = process_logits(torch.from_numpy(logits)[None], [event.sampling])[0]
            return weights.log_softmax(0)
    return torch.from_numpy(logits).double().log_softmax(0)


def make_events(seed: int) -> list[Submit]:
    rng = random.Random(seed)
    return [
        make_submit(
            f"s{index}",
            [rng.randrange(32) for _ in range(4)],
            max_tokens=24,
            stop_token_ids=rng.sample(range(32), 2),
            min_tokens=rng.choice([0, 8]),
            logprobs=rng.choice([None, 0, 1, 5, 20]),
            sampling=SamplingParams(
                temperature=rng.choice([0.0, 0.8, 1.3]),
                top_k=rng.choice([0, 3]),
                top_p=rng.choice([1.0, 0.9]),
                presence_penalty=rng.choice([0.0, 1.5]),
                repetition_penalty=rng.choice([1.0, 1.3]),
                bad_token_ids=(2, 9),
                seed=rng.getrandbits(64),
            ),
        )
        for index in range(16)
    ]


@pytest.mark.parametrize("mode", LogprobsMode)
@pytest.mark.parametrize("num_tokens", [0, 4])
@pytest.mark.parametrize("noise", [0.0, 0.4], ids=["perfect", "noised"])
def test_every_committed_token_has_those_of_its_own_position(
    mode: LogprobsMode, num_tokens: int, noise: float
) -> None:
    config = TargetEngineConfig(
        num_speculative_tokens=num_tokens, ngram=NgramConfig(enabled=False), logprobs_mode=mode
    )
    network = Listener(TargetEngine(HashRunner(TARGET), config))
    network.join(HashLaw(noise=noise))
    events = {event.sequence_id: event for event in make_events(3)}
    for event in events.values():
        network.submit(event)
    network.run()

    histories = {sequence_id: list(event.token_ids) for sequence_id, event in events.items()}
    kinds: set[tuple[bool, bool]] = set()
    """(accepted, follows an accepted one) of the tokens that were looked at."""
    for message in network.heard:
        event, history = events[message.sequence_id], histories[message.sequence_id]
        assert len(message.logprobs) == (0 if event.logprobs is None else len(message.token_ids))
        for index, token_id in enumerate(message.token_ids):
            if event.logprobs is not None:
                expected = expected_logprobs(event, history, mode)
                found = message.logprobs[index]
                assert math.isclose(found.logprob, expected[token_id].item(), abs_tol=1e-9)
                possible = int((expected > -math.inf).sum())
                values, ids = expected.sort(descending=True, stable=True)
                size = min(event.logprobs, possible)
                assert [other for other, _ in found.top] == ids[:size].tolist()
                assert np.allclose([value for _, value in found.top], values[:size].numpy(), atol=1e-9)
                kinds.add((message.accepted[index], index > 0))
            history.append(token_id)
    for event in events.values():
        assert histories[event.sequence_id][event.prompt_length :] == reference(TARGET, event)[0]
    assert kinds == ({(False, False)} if num_tokens == 0 else kinds)
    if num_tokens:
        assert {(True, False), (True, True), (False, True)} <= kinds
        assert (noise == 0.0) or (False, False) in kinds
    reasons = {end.reason for end in network.gateway.finished.values()}
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}


def test_a_stop_inside_a_step_cuts_them_with_the_ids() -> None:
    tokens, _ = reference(TARGET, make_submit(max_tokens=12))
    place = next(index for index in range(2, 9) if tokens.index(tokens[index]) == index and index % 5 != 4)
    event = make_submit(max_tokens=12, stop_token_ids=[tokens[place]], logprobs=2)
    config = TargetEngineConfig(num_speculative_tokens=8, ngram=NgramConfig(enabled=False))
    network = Listener(TargetEngine(HashRunner(TARGET), config))
    network.join(TARGET)
    network.submit(event)
    network.run()
    assert network.gateway.completions[("s", 1)] == tokens[: place + 1]
    last = network.heard[-1]
    assert last.accepted[-1], "the stop token was to be inside a tail"
    assert len(last.logprobs) == len(last.token_ids)
