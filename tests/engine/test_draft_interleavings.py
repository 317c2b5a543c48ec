"""The draft engine under any order of events, against an oracle that knows only what was said."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from paceline.actors.engine.config import DraftEngineConfig
from paceline.actors.engine.draft_engine import DraftEngine
from paceline.actors.engine.messages import Candidates, Close
from paceline.actors.engine.parameters import SamplingParams
from tests.engine.paged_fake import VOCAB_SIZE, PagedFake, chain_after, opened, verdict

MAX_WINDOW = 6


@dataclass
class Mirror:
    """What the target knows of one sequence: the oracle."""

    params: SamplingParams
    epoch: int
    committed: list[int]
    window: int
    revision: int = 0
    chain: list[int] = field(default_factory=list)
    """Tokens past ``committed`` that the draft has told."""
    num_corrections: int = 0
    """By how much the revision may have risen unheard."""

    def told(self, message: Candidates) -> None:
        # A branch takes the chain's place, and may be corrected by the same verdict.
        assert min(self.num_corrections, 1) <= message.revision - self.revision <= self.num_corrections
        self.revision, self.num_corrections = message.revision, 0
        assert message.base_position == len(self.committed) + len(self.chain)
        for token_id in message.token_ids:
            assert [token_id] == chain_after([*self.committed, *self.chain], self.params, 1)
            self.chain.append(token_id)
        # A tail that was prepared while the window was wider is told whole.
        assert len(self.chain) <= max(self.window, MAX_WINDOW)


class Interleavings(RuleBasedStateMachine):
    """Opens, verdicts of every kind, steps and departures in any order, against the oracle.

    The oracle learns of chain tokens only through messages, so it takes the outbox before each verdict:
    then it knows the whole chain and can tell the revision exactly.
    """

    @initialize(num_blocks=st.sampled_from([24, 400]))
    def start(self, num_blocks: int) -> None:
        self.runner = PagedFake(num_blocks=num_blocks, block_size=2, max_model_len=96)
        self.engine = DraftEngine(
            self.runner,
            DraftEngineConfig(max_num_seqs=4, max_num_batched_tokens=24, max_branches=8),
            lambda: 0.0,
        )
        self.mirrors: dict[tuple[str, str], Mirror] = {}
        self.epoch = 0
        for peer in ("t", "u"):
            self.engine.target_joined(peer, VOCAB_SIZE)

    def listen(self) -> None:
        for peer, output in self.engine.take_outbox().items():
            for decline in output.declines:
                self.mirrors.pop((peer, decline.sequence_id), None)
            for message in output.candidates:
                self.mirrors[peer, message.sequence_id].told(message)

    @rule(
        peer=st.sampled_from(["t", "u"]),
        name=st.sampled_from(["a", "b", "c"]),
        prompt=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=40),
        window=st.integers(0, MAX_WINDOW),
        temperature=st.sampled_from([0.0, 1.0]),
    )
    def open(self, peer: str, name: str, prompt: list[int], window: int, temperature: float) -> None:
        self.listen()
        self.epoch += 1
        params = SamplingParams(temperature=temperature, seed=self.epoch)
        self.mirrors[peer, name] = Mirror(params, self.epoch, prompt, window)
        self.engine.open(peer, opened(name, prompt, window=window, params=params, epoch=self.epoch))
        self.listen()

    @rule(
        data=st.data(),
        accepted=st.integers(0, MAX_WINDOW),
        extra=st.integers(0, 4),
        window=st.integers(0, MAX_WINDOW),
        branch_tokens=st.integers(0, MAX_WINDOW),
        tail_tokens=st.integers(0, MAX_WINDOW),
    )
    def judge(
        self,
        data: st.DataObject,
        accepted: int,
        extra: int,
        window: int,
        branch_tokens: int,
        tail_tokens: int,
    ) -> None:
        self.listen()
        if not self.mirrors:
            return
        peer, name = data.draw(st.sampled_from(sorted(self.mirrors)))
        mirror = self.mirrors[peer, name]
        head = mirror.chain[:accepted]
        ids = st.one_of(st.integers(0, VOCAB_SIZE - 1), st.sampled_from(mirror.chain or [0]))
        committed = [*head, *data.draw(st.lists(ids, min_size=extra, max_size=extra))]
        base = len(mirror.committed)
        self.engine.verdict(
            peer,
            verdict(
                name,
                base,
                committed,
                window=window,
                epoch=mirror.epoch,
                branch_tokens=branch_tokens,
                tail_tokens=tail_tokens,
            ),
        )
        common = min(len(committed), len(mirror.chain))
        if committed[:common] == mirror.chain[:common]:
            mirror.chain = mirror.chain[common:]
        else:
            mirror.num_corrections += 1 + extra
            mirror.chain = []
        mirror.committed = [*mirror.committed, *committed]
        mirror.window = max(window, len(mirror.chain))
        self.listen()

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()
        self.listen()

    @rule()
    def step_without_listening(self) -> None:
        self.engine.step()

    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        self.listen()
        if self.mirrors:
            peer, name = data.draw(st.sampled_from(sorted(self.mirrors)))
            self.engine.close(peer, Close(name, self.mirrors.pop((peer, name)).epoch))

    @rule(peer=st.sampled_from(["t", "u"]))
    def leave_and_return(self, peer: str) -> None:
        self.engine.target_left(peer)
        self.engine.target_joined(peer, VOCAB_SIZE)
        self.mirrors = {key: mirror for key, mirror in self.mirrors.items() if key[0] != peer}

    @invariant()
    def consistent(self) -> None:
        self.engine.check_invariants()

    def teardown(self) -> None:
        """Whatever happened, the draft comes to rest with every chain full, and gives all blocks back."""
        for _ in range(400):
            if not self.engine.has_work():
                break
            self.engine.step()
        self.listen()
        assert not self.engine.has_work()
        for mirror in self.mirrors.values():
            assert len(mirror.chain) >= min(mirror.window, 96 - len(mirror.committed))
        for peer in ("t", "u"):
            self.engine.target_left(peer)
        assert self.engine.snapshot().num_free_blocks == self.engine.snapshot().num_blocks


Interleavings.TestCase.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestInterleavings = Interleavings.TestCase
