"""Target and draft taking turns in this process: the engines as they are served, without the wire."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.actors.engine.config import DraftEngineConfig, Hardware, NgramConfig, TargetEngineConfig
from paceline.actors.engine.draft_engine import DraftEngine
from paceline.actors.engine.messages import Committed, DraftHello, Submit
from paceline.actors.engine.parameters import (
    SamplingParams,
    SpeculationParams,
    SpeculationStats,
    StoppingParams,
    VerificationRule,
)
from paceline.actors.engine.target_engine import TargetEngine

if TYPE_CHECKING:
    import torch

    from paceline.actors.engine.batch import ModelRunner, SequenceSlice

PEER = "peer"


@dataclass
class Answer:
    """One sequence, and where its tails were tested."""

    prompt: list[int]
    seed: int
    token_ids: list[int] = field(default_factory=list)
    tested: list[tuple[int, int, bool]] = field(default_factory=list)
    """(absolute position, depth in its tail from 0, agreed) of each draft token that was compared."""
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    finished: bool = False


class FewBlocks:
    """A runner of which only the first KV blocks are used."""

    def __init__(self, runner: ModelRunner, num_blocks: int) -> None:
        self._runner = runner
        self.num_blocks = num_blocks
        self.vocab_size = runner.vocab_size
        self.max_model_len = runner.max_model_len
        self.block_size = runner.block_size

    def forward(self, batch: Sequence[SequenceSlice]) -> torch.Tensor:
        return self._runner.forward(batch)


class Lockstep:
    """A target and at most one draft.

    Args:
        num_speculative_tokens: length of every tail; 0 = no drafts.
        num_blocks: KV blocks of the target; None = all of the runner's. Few make it preempt.
    """

    def __init__(
        self,
        target_runner: ModelRunner,
        draft_runner: ModelRunner | None,
        *,
        num_speculative_tokens: int,
        max_tokens: int,
        rule: str = "coupled",
        temperature: float = 0.0,
        max_num_seqs: int = 64,
        num_blocks: int | None = None,
    ) -> None:
        self._runner = target_runner if num_blocks is None else FewBlocks(target_runner, num_blocks)
        self._num_speculative_tokens = num_speculative_tokens if draft_runner is not None else 0
        self._max_tokens = max_tokens
        self._rule = VerificationRule(rule)
        self._temperature = temperature
        self._draft_runner = draft_runner
        self._config = TargetEngineConfig(
            num_speculative_tokens=self._num_speculative_tokens,
            max_num_seqs=max_num_seqs,
            ngram=NgramConfig(enabled=False),
            hardware=Hardware.SHARED,
            wait_for_drafts=False,
        )
        self._answers: dict[str, Answer] = {}
        self._epoch = 0
        self.num_steps = 0
        self.num_preemptions = 0
        self._start()

    def _start(self) -> None:
        self._target = TargetEngine(self._runner, self._config)
        self._draft: DraftEngine | None = None
        runner = self._draft_runner
        if runner is not None and self._num_speculative_tokens:
            self._draft = DraftEngine(runner, DraftEngineConfig())
            self._draft.target_joined(PEER, self._runner.vocab_size)
            hello = DraftHello(PEER, "draft", runner.vocab_size, 64, runner.max_model_len, "model")
            self._target.draft_joined(PEER, hello)

    def submit(self, prompt: Sequence[int], seed: int) -> Answer:
        answer = Answer(list(prompt), seed)
        name = str(len(self._answers))
        self._answers[name] = answer
        self._place(name, answer)
        return answer

    def replace_target(self) -> None:
        """The target is lost, KV and all: a new one takes over what is committed."""
        self.num_preemptions += self._target.snapshot().num_preemptions_total
        self._epoch += 1
        self._start()
        for name, answer in self._answers.items():
            if not answer.finished:
                self._place(name, answer)

    def _place(self, name: str, answer: Answer) -> None:
        self._target.submit(
            PEER,
            Submit(
                sequence_id=name,
                epoch=self._epoch,
                token_ids=(*answer.prompt, *answer.token_ids),
                prompt_length=len(answer.prompt),
                sampling=SamplingParams(temperature=self._temperature, seed=answer.seed),
                stopping=StoppingParams(max_tokens=self._max_tokens),
                speculation=SpeculationParams(rule=self._rule),
            ),
        )

    def run(self, num_steps: int | None = None) -> None:
        """Until all are finished, or for so many steps of the target."""
        while num_steps is None or num_steps > 0:
            if all(answer.finished for answer in self._answers.values()):
                break
            self._turn()
            num_steps = None if num_steps is None else num_steps - 1

    @property
    def preemptions(self) -> int:
        return self.num_preemptions + self._target.snapshot().num_preemptions_total

    def _turn(self) -> None:
        self._target.step()
        self.num_steps += 1
        outbox = self._target.take_outbox()
        for output in outbox.gateways.values():
            for committed in output.committed:
                self._note(self._answers[committed.sequence_id], committed)
            for finished in output.finished:
                answer = self._answers[finished.sequence_id]
                if finished.error:
                    raise RuntimeError(finished.error)
                answer.finished, answer.stats = True, finished.speculation
        draft = self._draft
        if draft is None:
            return
        for told in outbox.drafts.values():
            for closed in told.closes:
                draft.close(PEER, closed)
            for opened in told.opens:
                draft.open(PEER, opened)
            for verdict in told.verdicts:
                draft.verdict(PEER, verdict)
        while draft.has_work():
            draft.step()
        for message in draft.take_outbox().values():
            self._target.candidates(PEER, message.candidates, message.step_seconds)

    def _note(self, answer: Answer, committed: Committed) -> None:
        """The tested positions: those accepted, and the first that was not, unless it is the bonus token of a
        tail that was accepted whole. The first step of a sequence has no tail."""
        if answer.token_ids and self._draft is not None:
            tail = min(self._num_speculative_tokens, self._max_tokens - len(answer.token_ids) - 1)
            for depth, agreed in enumerate(committed.accepted[:tail]):
                answer.tested.append((committed.base_position + depth, depth, agreed))
        answer.token_ids.extend(committed.token_ids)
