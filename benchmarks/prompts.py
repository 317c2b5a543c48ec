"""Spec-Bench prompts (first turns), sampled so that every category is represented."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SPEC_BENCH = Path(__file__).parent / "data" / "spec_bench_even.jsonl"


@dataclass(frozen=True)
class BenchPrompt:
    question_id: int
    category: str
    text: str


def spec_bench(count: int, *, seed: int = 0, max_characters: int | None = None) -> list[BenchPrompt]:
    """``count`` first turns, drawn round-robin over the categories in a seeded order.

    Args:
        count: How many prompts.
        seed: Of the order within each category.
        max_characters: Longer prompts are left out (for machines where a long prefill would dominate).
    """
    by_category: dict[str, list[BenchPrompt]] = {}
    with SPEC_BENCH.open(encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            prompt = BenchPrompt(int(row["question_id"]), row["category"], row["turns"][0])
            if max_characters is None or len(prompt.text) <= max_characters:
                by_category.setdefault(prompt.category, []).append(prompt)
    shuffler = random.Random(seed)
    for prompts in by_category.values():
        shuffler.shuffle(prompts)
    chosen: list[BenchPrompt] = []
    while len(chosen) < count and any(by_category.values()):
        for prompts in by_category.values():
            if prompts and len(chosen) < count:
                chosen.append(prompts.pop())
    return chosen


def encoded(model: str, prompts: Sequence[BenchPrompt]) -> list[list[int]]:
    """Token ids of the prompts as first turns of conversations with ``model``."""
    from paceline.actors import weights
    from paceline.cluster.tokenization import ChatMessage, load_codec

    codec = load_codec(str(weights.resolve(model)))
    return [codec.encode_conversation([ChatMessage("user", prompt.text, 0)]) for prompt in prompts]


def chat_texts(model: str, prompts: Sequence[BenchPrompt]) -> dict[int, str]:
    """Question id -> the prompt as the first turn of a conversation, in the template of ``model``."""
    from transformers import AutoTokenizer

    from paceline.actors import weights

    tokenizer = AutoTokenizer.from_pretrained(str(weights.resolve(model)))
    texts: dict[int, str] = {}
    for prompt in prompts:
        turns = [{"role": "user", "content": prompt.text}]
        texts[prompt.question_id] = tokenizer.apply_chat_template(
            turns, tokenize=False, add_generation_prompt=True
        )
    return texts
