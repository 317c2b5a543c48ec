"""One stream: plain decoding, drafted decoding and ``transformers``, interleaved prompt by prompt.

    python -m benchmarks.single_stream --prompts 12 --max-tokens 128

What is compared, always on the same prompt one after the other, in an order that changes from prompt to
prompt, with the same weights, precision and threads:

    plain        Paceline without speculation
    drafted      Paceline with its draft pool (and prompt lookup, unless --no-ngram)
    generate     transformers' generate
    assisted     transformers' assisted generation with the same draft

The last lines compare the measured speed-up with the best that lock-step speculation can give at the
measured acceptance α and cost ratio c (draft step / target step): the highest E(γ) / (γ·c + 1) with
E(γ) = (1 − α^(γ+1)) / (1 − α), Leviathan et al. 2023, section 3.
"""

from __future__ import annotations

import os

# Two processes take turns on the same cores: a thread that spins while it waits steals the other's time.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
os.environ.setdefault("KMP_BLOCKTIME", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer
from rich.progress import Progress

from benchmarks.prompts import BenchPrompt, spec_bench
from benchmarks.report import print_table, spread, write_json
from benchmarks.token_clock import TokenClock

CONTENDERS = ("plain", "drafted", "generate", "assisted")


@dataclass(frozen=True)
class Run:
    """One contender on one prompt."""

    contender: str
    question_id: int
    category: str
    num_tokens: int
    seconds: float
    """From the request to the last token, prompt included."""
    decode_seconds: float
    """Between the first and the last token; 0 where only the total is known."""
    num_first: int
    rounds: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    token_ids: tuple[int, ...] = ()

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds


class Transformers:
    """The baselines, in this process."""

    def __init__(self, model: str, draft: str, dtype: str, max_tokens: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from paceline.actors import weights

        target, assistant = str(weights.resolve(model)), str(weights.resolve(draft))
        kind = getattr(torch, dtype)
        self._torch = torch
        self._tokenizer = AutoTokenizer.from_pretrained(target)
        self._model = AutoModelForCausalLM.from_pretrained(target, dtype=kind).eval()
        self._assistant = AutoModelForCausalLM.from_pretrained(assistant, dtype=kind).eval()
        self._max_tokens = max_tokens

    def run(self, prompt: BenchPrompt, token_ids: list[int], *, assisted: bool) -> Run:
        ids = self._torch.tensor([token_ids])
        clock = TokenClock()
        options: dict[str, Any] = {"assistant_model": self._assistant} if assisted else {}
        started = time.perf_counter()
        with self._torch.inference_mode():
            output = self._model.generate(
                ids,
                attention_mask=self._torch.ones_like(ids),
                max_new_tokens=self._max_tokens,
                do_sample=False,
                streamer=clock,
                **options,
            )
        seconds = time.perf_counter() - started
        new = output[0, len(token_ids) :].tolist()
        moments = clock.moments
        # The first one is the prompt's.
        decode = moments[-1][0] - moments[1][0] if len(moments) > 2 else 0.0
        return Run(
            "assisted" if assisted else "generate",
            prompt.question_id,
            prompt.category,
            len(new),
            seconds,
            decode,
            moments[1][1] if len(moments) > 1 else 0,
            token_ids=tuple(new),
        )


def run_paceline(stub: Any, prompt: BenchPrompt, max_tokens: int, *, drafted: bool) -> Run:
    from paceline.cluster.cli_request import RequestOptions, build_request
    from paceline.cluster.client import stream

    options = RequestOptions(chat=True, temperature=0.0, max_tokens=max_tokens)
    request = build_request(prompt.text, options)
    if not drafted:
        request.speculation.num_speculative_tokens = 0
    token_ids: list[int] = []
    final, timing = stream(stub, request, lambda chunk: token_ids.extend(chunk.token_ids))
    speculation = final.speculation
    return Run(
        "drafted" if drafted else "plain",
        prompt.question_id,
        prompt.category,
        timing.num_tokens,
        timing.last_token,
        timing.last_token - timing.first_token,
        timing.num_first,
        speculation.rounds,
        speculation.draft_tokens,
        speculation.accepted_tokens,
        tuple(token_ids),
    )


def pool_counters() -> dict[str, Any]:
    """The target's and the draft's own view, after the runs."""
    from paceline.cluster.cli_status import collect_status

    pools = collect_status()["pools"]
    return {name: pools[name]["replicas"][0] for name in ("target", "draft") if name in pools}


def acceptance_of(before: dict[str, Any], after: dict[str, Any]) -> float:
    """α of a draft between two looks at it: agreement per tested position."""
    tested, foretold = (after[name] - before[name] for name in ("num_tested_total", "num_foretold_total"))
    return float(foretold / tested) if tested else 0.0


def best_speedup(acceptance: float, cost_ratio: float, most: int = 16) -> tuple[int, float]:
    """γ and speed-up that the formula calls best."""
    from paceline.actors.engine.pacing import expected_tokens

    speedups = [expected_tokens(acceptance, gamma) / (gamma * cost_ratio + 1.0) for gamma in range(most + 1)]
    best = max(range(most + 1), key=lambda gamma: speedups[gamma])
    return best, speedups[best]


def ratios(runs: list[Run], above: str, below: str, decode_only: bool = False) -> list[float]:
    """Speed of ``above`` / speed of ``below``, prompt by prompt."""

    def speed(run: Run) -> float:
        if decode_only and run.decode_seconds > 0:
            return (run.num_tokens - run.num_first) / run.decode_seconds
        return run.tokens_per_second

    by_key = {(run.contender, run.question_id): speed(run) for run in runs}
    return [
        by_key[above, question] / by_key[below, question]
        for question in sorted({run.question_id for run in runs})
        if (above, question) in by_key and (below, question) in by_key and by_key[below, question] > 0
    ]


def main(
    model: Annotated[str, typer.Option(help="The target.")] = "qwen2.5-coder-1.5b-instruct",
    draft: Annotated[str, typer.Option(help="The draft.")] = "qwen2.5-coder-0.5b-instruct",
    prompts: Annotated[int, typer.Option(help="Spec-Bench prompts.")] = 12,
    max_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 128,
    max_characters: Annotated[int, typer.Option(help="Leave out longer prompts.")] = 1500,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    ngram: Annotated[bool, typer.Option(help="Prompt lookup beside the draft.")] = True,
    gamma: Annotated[int | None, typer.Option(help="Fixed draft length; default: adaptive.")] = None,
    enforce_eager: Annotated[bool, typer.Option(help="Or: compile the draft's steps.")] = True,
    baselines: Annotated[bool, typer.Option(help="Run transformers as well.")] = True,
    seed: Annotated[int, typer.Option(help="Of the choice of prompts.")] = 0,
    name: Annotated[str, typer.Option(help="Name of the JSON file.")] = "single_stream",
) -> None:
    """Run it, print the tables, write results/<name>.json."""
    from paceline.cluster.client import connect
    from paceline.cluster.config import load_config
    from paceline.cluster.runtime import free_port
    from paceline.cluster.service_start import check_models, serving
    from paceline.protos import generation_pb2 as proto

    chosen = spec_bench(prompts, seed=seed, max_characters=max_characters)
    config = load_config(
        {
            "model": model,
            # Each prompt is sent twice: its second prefill is to cost what the first did.
            "draft": {
                "model": draft,
                "dtype": dtype,
                "enforce_eager": enforce_eager,
                "kv_cache": {"memory_gb": 0.5},
                "enable_prefix_caching": False,
            },
            "dtype": dtype,
            "target": {"kv_cache": {"memory_gb": 0.5}, "enable_prefix_caching": False},
            "speculation": {"ngram": {"enabled": ngram}, "num_speculative_tokens": gamma},
            "gateway": {"grpc_port": free_port()},
        }
    )
    check_models(config)
    runs: list[Run] = []
    with serving(config, address="local") as service, connect(service.grpc_address) as stub:

        def token_ids(prompt: BenchPrompt) -> list[int]:
            request = proto.TokenizeRequest()
            request.conversation.messages.add(role="user", content=prompt.text)
            return list(stub.Tokenize(request).token_ids)

        contenders: dict[str, Callable[[BenchPrompt], Run]] = {
            "plain": lambda prompt: run_paceline(stub, prompt, max_tokens, drafted=False),
            "drafted": lambda prompt: run_paceline(stub, prompt, max_tokens, drafted=True),
        }
        if baselines:
            reference = Transformers(model, draft, dtype, max_tokens)
            contenders["generate"] = lambda prompt: reference.run(prompt, token_ids(prompt), assisted=False)
            contenders["assisted"] = lambda prompt: reference.run(prompt, token_ids(prompt), assisted=True)
        warm = BenchPrompt(0, "", "Write a short poem about rivers.")
        for run_warm in contenders.values():
            run_warm(warm)
        gc.collect()
        before = pool_counters()
        order = list(contenders)
        with Progress() as progress:
            task = progress.add_task("prompts × contenders", total=len(chosen) * len(order))
            for index, prompt in enumerate(chosen):
                shift = index % len(order)
                for contender in order[shift:] + order[:shift]:
                    runs.append(contenders[contender](prompt))
                    progress.advance(task)
        counters = pool_counters()
    settings = {
        "model": model,
        "draft": draft,
        "dtype": dtype,
        "ngram": ngram,
        "num_speculative_tokens": gamma,
        "enforce_eager": enforce_eager,
        "max_tokens": max_tokens,
    }
    report(runs, before, counters, name, settings)


def report(
    runs: list[Run],
    before: dict[str, Any],
    counters: dict[str, Any],
    name: str,
    settings: dict[str, Any],
) -> None:
    present = [contender for contender in CONTENDERS if any(run.contender == contender for run in runs)]
    rows = []
    for contender in present:
        own = [run for run in runs if run.contender == contender]
        decode = [
            (run.num_tokens - run.num_first) / run.decode_seconds for run in own if run.decode_seconds > 0
        ]
        rows.append(
            [
                contender,
                sum(run.num_tokens for run in own),
                spread([run.tokens_per_second for run in own]),
                spread(decode),
                f"{sum(run.num_tokens for run in own) / sum(run.seconds for run in own):.2f}",
            ]
        )
    print_table(
        "single stream, greedy",
        ["", "tokens", "tokens/s, whole request", "tokens/s, after the first", "total tokens / total s"],
        rows,
    )
    comparisons = [
        ("plain", "generate"),
        ("drafted", "plain"),
        ("drafted", "generate"),
        ("drafted", "assisted"),
        ("assisted", "generate"),
    ]
    ratio_rows = []
    for above, below in comparisons:
        whole, decode = ratios(runs, above, below), ratios(runs, above, below, decode_only=True)
        if whole:
            ratio_rows.append([f"{above} / {below}", spread(whole), spread(decode)])
    print_table(
        "speed ratios per prompt, median [quartiles]", ["", "whole request", "decode only"], ratio_rows
    )

    drafted = [run for run in runs if run.contender == "drafted"]
    rounds = sum(run.rounds for run in drafted)
    proposed = sum(run.draft_tokens for run in drafted)
    accepted = sum(run.accepted_tokens for run in drafted)
    summary: dict[str, Any] = {"rounds": rounds, "draft_tokens": proposed, "accepted_tokens": accepted}
    if rounds and counters.get("draft"):
        plain = [run for run in runs if run.contender == "plain"]
        target_step = statistics.median(
            run.decode_seconds / max(run.num_tokens - run.num_first, 1) for run in plain
        )
        draft_row = counters["target"]["engine"]["drafts"][0]
        draft_step = float(draft_row["step_seconds"])
        alpha = acceptance_of(before["target"]["engine"]["drafts"][0], draft_row)
        cost_ratio = draft_step / target_step
        gamma, best = best_speedup(alpha, cost_ratio)
        measured = statistics.median(ratios(runs, "drafted", "plain", decode_only=True))
        summary |= {
            "acceptance_of_draft": alpha,
            "draft_step_seconds": draft_step,
            "target_step_seconds": target_step,
            "cost_ratio": cost_ratio,
            "best_gamma": gamma,
            "best_speedup": best,
            "measured_speedup": measured,
            "measured_over_best": measured / best,
        }
        print_table(
            "against the formula",
            ["", "value"],
            [
                [
                    "accepted / drafted (draft and lookup)",
                    f"{accepted}/{proposed} = {accepted / proposed:.3f}",
                ],
                ["mean acceptance length", f"{1 + accepted / rounds:.2f}"],
                ["tokens per target step", f"{_tokens_per_step(drafted):.2f}"],
                ["α of the draft (per tested position)", f"{alpha:.3f}"],
                ["draft step / target step, ms", f"{draft_step * 1e3:.1f} / {target_step * 1e3:.1f}"],
                ["cost ratio c", f"{cost_ratio:.3f}"],
                ["formula's best", f"{best:.3f} at γ = {gamma}"],
                ["measured speed-up (decode)", f"{measured:.3f}"],
                ["measured / best", f"{measured / best:.3f}"],
            ],
        )
    summary["same_tokens_plain_drafted"] = same_tokens(runs, "plain", "drafted")
    summary["same_tokens_plain_generate"] = same_tokens(runs, "plain", "generate")
    print_table(
        "identical answers",
        ["", "prompts"],
        [[key, value] for key, value in summary.items() if "same" in key],
    )
    path = write_json(
        name,
        {
            "settings": settings,
            "summary": summary,
            "runs": [asdict(run) for run in runs],
            "counters": counters,
        },
    )
    print(f"written: {path.name}")


def _tokens_per_step(runs: list[Run]) -> float:
    """Committed tokens per target step; steps without a tail are those that the rounds do not explain."""
    tokens = sum(run.num_tokens for run in runs)
    rounds = sum(run.rounds for run in runs)
    accepted = sum(run.accepted_tokens for run in runs)
    plain_steps = tokens - accepted - rounds
    return tokens / max(rounds + plain_steps, 1)


def same_tokens(runs: list[Run], first: str, second: str) -> str:
    """On how many prompts two contenders gave the same tokens (bfloat16 rows may differ in the last bit)."""
    by_key = {(run.contender, run.question_id): run.token_ids for run in runs}
    questions = sorted({run.question_id for run in runs if (second, run.question_id) in by_key})
    equal = sum(by_key[first, question] == by_key[second, question] for question in questions)
    return f"{equal} of {len(questions)}"


if __name__ == "__main__":
    typer.run(main)
