"""Time to the first token with a warm prefix cache: a long shared system prompt, and the turns of a chat.

    python -m benchmarks.prefix_cache --repeats 5

Each repeat has a system prompt of its own, so that its first request is cold:

    cold         the first request with a system prompt
    warm         another user's request with the same one
    second turn  the warm chat goes on: its prompt is system prompt, question, answer and a new question

The same requests then go to a service without prefix caching: their token ids must be the same, and its
times tell what each would have taken (cold and warm alike, the longer second turn a little more).
"""

from __future__ import annotations

import os

# Gateway and target take turns on the same cores: a thread that spins while it waits steals the other's time.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
os.environ.setdefault("KMP_BLOCKTIME", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import itertools
import statistics
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from benchmarks.prompts import spec_bench
from benchmarks.report import print_table, spread, write_json

KINDS = ("cold", "warm", "second turn")
QUESTIONS = (
    "Who are you, in one sentence?",
    "Which of these would you do first, and why?",
    "Thank you. Say that again in fewer words.",
)


@dataclass(frozen=True)
class Run:
    """One request."""

    kind: str
    repeat: int
    caching: bool
    prompt_tokens: int
    cached_prompt_tokens: int
    first_token: float
    """Seconds from the request to the first token."""
    token_ids: tuple[int, ...]


def system_prompt(stub: Any, seed: int, num_tokens: int) -> str:
    """At least ``num_tokens`` tokens of text that no other seed begins with."""
    from paceline.protos import generation_pb2 as proto

    text = f"You are assistant number {seed}. Your users may ask you such things:"
    for prompt in itertools.cycle(spec_bench(40, seed=seed, max_characters=400)):
        if len(stub.Tokenize(proto.TokenizeRequest(prompt=text)).token_ids) >= num_tokens:
            return text
        text += f"\n- {prompt.text}"
    raise AssertionError("there are no prompts")


def ask(stub: Any, messages: list[tuple[str, str]], max_tokens: int) -> tuple[str, Any, Any, tuple[int, ...]]:
    """Greedy answer to a chat: its text, the last chunk, the times and the token ids."""
    from paceline.cluster.client import stream
    from paceline.protos import generation_pb2 as proto

    request = proto.GenerateRequest()
    for role, content in messages:
        request.conversation.messages.add(role=role, content=content)
    request.sampling.temperature = 0.0
    request.stopping.max_tokens = max_tokens
    request.stopping.ignore_eos = True
    chunks: list[Any] = []
    final, timing = stream(stub, request, chunks.append)
    text = "".join(chunk.text for chunk in chunks)
    return text, final, timing, tuple(token_id for chunk in chunks for token_id in chunk.token_ids)


def serve_and_ask(
    model: str, dtype: str, repeats: int, num_tokens: int, max_tokens: int, *, caching: bool
) -> list[Run]:
    from paceline.cluster.client import connect
    from paceline.cluster.config import load_config
    from paceline.cluster.runtime import free_port
    from paceline.cluster.service_start import check_models, serving

    config = load_config(
        {
            "model": model,
            "dtype": dtype,
            "target": {"kv_cache": {"memory_gb": 0.5}, "enable_prefix_caching": caching},
            "gateway": {"grpc_port": free_port()},
        }
    )
    check_models(config)
    runs: list[Run] = []
    with serving(config, address="local") as service, connect(service.grpc_address) as stub:
        ask(stub, [("user", "Write a short poem about rivers.")], 8)
        for repeat in range(repeats):
            system = ("system", system_prompt(stub, repeat, num_tokens))
            chats = [[system, ("user", QUESTIONS[0])], [system, ("user", QUESTIONS[1])]]
            for kind in KINDS:
                chat = chats[min(KINDS.index(kind), 1)]
                text, final, timing, token_ids = ask(stub, chat, max_tokens)
                usage = final.usage
                runs.append(
                    Run(
                        kind,
                        repeat,
                        caching,
                        usage.prompt_tokens,
                        usage.cached_prompt_tokens,
                        timing.first_token,
                        token_ids,
                    )
                )
                chat += [("assistant", text), ("user", QUESTIONS[2])]
    return runs


def report(runs: list[Run], name: str, settings: dict[str, Any]) -> None:
    def times(kind: str, caching: bool) -> list[float]:
        return [run.first_token for run in runs if run.kind == kind and run.caching is caching]

    cold = times("cold", True)
    rows = []
    ratios: dict[str, list[float]] = {}
    for kind in KINDS:
        own = [run for run in runs if run.kind == kind and run.caching]
        ratios[kind] = [warm / first for warm, first in zip(times(kind, True), cold, strict=True)]
        rows.append(
            [
                kind,
                round(statistics.median(run.prompt_tokens for run in own)),
                round(statistics.median(run.cached_prompt_tokens for run in own)),
                spread([1e3 * value for value in times(kind, True)]),
                spread([1e3 * value for value in times(kind, False)]),
                spread(ratios[kind]),
            ]
        )
    columns = ["", "prompt tokens", "of which cached", "TTFT, ms", "TTFT without cache, ms", "TTFT / cold"]
    print_table("shared system prompt: median and quartiles", columns, rows)
    ids = {(run.kind, run.repeat, run.caching): run.token_ids for run in runs}
    different = [
        f"{kind} {repeat}"
        for kind, repeat, caching in ids
        if caching and ids[kind, repeat, True] != ids[kind, repeat, False]
    ]
    print(f"token ids with and without cache: {'the same' if not different else f'differ in {different}'}")
    result = {
        "settings": settings,
        "ttft_ratio_to_cold": {kind: statistics.median(values) for kind, values in ratios.items()},
        "different": different,
        "runs": [asdict(run) for run in runs],
    }
    print(f"written to {write_json(name, result)}")


def main(
    model: Annotated[str, typer.Option(help="The target.")] = "smollm2-135m-instruct",
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    repeats: Annotated[int, typer.Option(help="System prompts.")] = 5,
    num_tokens: Annotated[int, typer.Option(help="Tokens of a system prompt, at least.")] = 1000,
    max_tokens: Annotated[int, typer.Option(help="Length of each answer.")] = 24,
    name: Annotated[str, typer.Option(help="Name of the JSON file.")] = "prefix_cache",
) -> None:
    """Run it, print the table, write results/<name>.json."""
    runs = [
        run
        for caching in (True, False)
        for run in serve_and_ask(model, dtype, repeats, num_tokens, max_tokens, caching=caching)
    ]
    settings = {"model": model, "dtype": dtype, "num_tokens": num_tokens, "max_tokens": max_tokens}
    report(runs, name, settings)


if __name__ == "__main__":
    typer.run(main)
