"""``paceline demo``: real weights, both pools, three prompts over gRPC, and what the drafts did."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Annotated

import grpc
import typer
from rich.console import Console
from rich.table import Table

from paceline.actors import weights
from paceline.actors.engine.errors import ModelError
from paceline.actors.weight_catalog import CATALOG, CatalogModel
from paceline.cluster.cli_chunks import chunk_printer
from paceline.cluster.cli_output import describe_rpc_error, pull_progress, show_share, stderr, stdout
from paceline.cluster.cli_request import RequestOptions, build_request, statistics_line
from paceline.cluster.cli_serve import StartProgress
from paceline.cluster.client import ServiceError, Timing, connect, stream
from paceline.cluster.config import PacelineConfig, load_config
from paceline.cluster.runtime import free_port
from paceline.cluster.service_start import RunningService, check_models, serving
from paceline.protos import generation_pb2 as proto
from paceline.protos import generation_pb2_grpc as rpc

DEFAULT_MODEL = "qwen2.5-coder-1.5b-instruct"
DEFAULT_MAX_TOKENS = 40

LEGEND = """\
plain/s, drafted/s: tokens a second after the first token, without and with drafts.
accepted: of the draft tokens verified. length: mean acceptance length, 1 + accepted / rounds.
"""

RESTED = """\
Few draft tokens were verified: by the measured step times drafting did not pay, and the drafts rested. On so
few cores that happens while something else is busy on the machine.
"""

EPILOG = """\
Examples:

paceline demo

paceline demo --model smollm2-135m-instruct --max-tokens 80
"""


@dataclass(frozen=True)
class DemoPrompt:
    """One of the three."""

    name: str
    prompt: str
    options: RequestOptions


@dataclass(frozen=True)
class Answer:
    """One request's outcome."""

    token_ids: tuple[int, ...]
    timing: Timing
    final: proto.GenerateChunk


@dataclass(frozen=True)
class Comparison:
    """One prompt, answered with drafts and without."""

    name: str
    drafted: Answer
    plain: Answer

    @property
    def rested(self) -> bool:
        """Hardly anything was drafted."""
        return self.drafted.final.speculation.draft_tokens < len(self.drafted.token_ids) / 4


def demo_prompts(max_tokens: int) -> list[DemoPrompt]:
    """One greedy, one sampled, one chat."""
    return [
        DemoPrompt(
            "greedy",
            "def fibonacci(n):\n",
            RequestOptions(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
        ),
        DemoPrompt(
            "sampled",
            "# A function that tells whether a word is a palindrome\n",
            RequestOptions(temperature=0.8, seed=7, max_tokens=max_tokens, ignore_eos=True),
        ),
        DemoPrompt(
            "chat",
            "Explain in two sentences what a hash table is.",
            RequestOptions(chat=True, temperature=0.0, max_tokens=max_tokens),
        ),
    ]


def demo_config(model: CatalogModel, port: int) -> PacelineConfig:
    """The pair to show, on adaptive speculation.

    A model without a smaller relative in the catalogue is drafted by its own weights. Such a draft never
    pays, so it is made to take part: a fixed tail, and running ahead though the cores are shared.
    """
    # Prompt lookup would blur what the draft pool does.
    speculation: dict[str, object] = {"ngram": {"enabled": False}}
    if model.draft is None:
        speculation |= {"num_speculative_tokens": 4, "hardware": "separate"}
    return load_config(
        {
            "model": model.name,
            "draft": {"model": model.draft or model.name, "kv_cache": {"memory_gb": 0.25}},
            "target": {"kv_cache": {"memory_gb": 0.5}},
            "speculation": speculation,
            "gateway": {"grpc_port": port},
        }
    )


def ask(
    stub: rpc.GenerationServiceStub, prompt: DemoPrompt, console: Console | None, *, speculate: bool
) -> Answer:
    """Run one prompt; with a console, show it as it comes."""
    request = build_request(prompt.prompt, prompt.options)
    if not speculate:
        request.speculation.num_speculative_tokens = 0
    token_ids: list[int] = []
    show = chunk_printer(console, stub, "", show_tokens=False) if console is not None else None

    def on_chunk(chunk: proto.GenerateChunk) -> None:
        token_ids.extend(chunk.token_ids)
        if show is not None:
            show(chunk)

    final, timing = stream(stub, request, on_chunk)
    return Answer(tuple(token_ids), timing, final)


def compare(stub: rpc.GenerationServiceStub, prompt: DemoPrompt) -> Comparison:
    """Answer one prompt with drafts, visibly, and again without."""
    console, notices = stdout(), stderr()
    console.print(f"\n[bold]{prompt.name}[/] ", end="")
    console.print(prompt.prompt.strip(), style="dim", markup=False)
    drafted = ask(stub, prompt, console, speculate=True)
    console.print()
    line = statistics_line(drafted.timing, [drafted.final])
    notices.print(line, style="dim", soft_wrap=True)
    plain = ask(stub, prompt, None, speculate=False)
    return Comparison(prompt.name, drafted, plain)


def comparison_table(comparisons: list[Comparison]) -> Table:
    """What the drafts did, in numbers."""
    table = Table(box=None, pad_edge=False)
    table.add_column("prompt", no_wrap=True)
    columns = ("tokens", "plain/s", "drafted/s", "gain", "accepted", "length")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("same tokens", no_wrap=True)
    for comparison in comparisons:
        drafted, plain = comparison.drafted, comparison.plain
        fast, slow = drafted.timing.decode_tokens_per_second, plain.timing.decode_tokens_per_second
        speculation = drafted.final.speculation
        table.add_row(
            comparison.name,
            str(len(drafted.token_ids)),
            f"{slow:.1f}",
            f"{fast:.1f}",
            f"{fast / slow:.2f}×" if slow else "–",
            show_share(speculation.accepted_tokens, speculation.draft_tokens),
            f"{speculation.mean_acceptance_length:.2f}" if speculation.rounds else "–",
            "yes" if drafted.token_ids == plain.token_ids else _first_difference(drafted, plain),
        )
    return table


def _first_difference(drafted: Answer, plain: Answer) -> str:
    pairs = zip(drafted.token_ids, plain.token_ids, strict=False)
    equal = next(
        (index for index, (left, right) in enumerate(pairs) if left != right),
        min(len(drafted.token_ids), len(plain.token_ids)),
    )
    return f"first {equal}"


def demo(
    model: Annotated[
        str, typer.Option(help="A name of 'paceline models list'; its draft comes with it.")
    ] = DEFAULT_MODEL,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens for each answer.")] = DEFAULT_MAX_TOKENS,
    port: Annotated[int | None, typer.Option(help="Port of the gRPC endpoint (default: a free one).")] = None,
) -> None:
    """Pull weights if they are missing, serve them, answer three prompts, show the gain, stop."""
    entry = CATALOG.get(model)
    if entry is None:
        raise ModelError(f"no model {model!r} in the catalogue: known are {', '.join(CATALOG)}")
    console, notices = stdout(), stderr()
    with pull_progress(notices) as progress:
        for name in dict.fromkeys((entry.name, entry.draft or entry.name)):
            weights.pull(name, progress, thorough=False)
    config = demo_config(entry, port or free_port())
    check_models(config)
    with contextlib.ExitStack() as stack:
        with StartProgress(notices) as started:
            service = stack.enter_context(
                serving(config, address="local", on_stage=started.stage, on_progress=started.pools)
            )
        introduce(console, entry, service)
        comparisons = answer_prompts(service.grpc_address, max_tokens)
        console.print()
        console.print(comparison_table(comparisons))
        console.print(f"\n{LEGEND}", soft_wrap=True)
        if any(comparison.rested for comparison in comparisons):
            console.print(RESTED, soft_wrap=True)
        notices.print("stopping")
    notices.print("stopped; nothing is left running")


def introduce(console: Console, entry: CatalogModel, service: RunningService) -> None:
    """Which pair runs, and what may be expected of it."""
    drafted_by = entry.draft or "its own weights"
    console.print(
        f"[bold]{entry.name}[/] on gRPC at {service.grpc_address}, drafted by [bold]{drafted_by}[/]",
        soft_wrap=True,
    )
    if entry.draft is None:
        console.print(
            "The catalogue has no smaller model with this tokenizer, so the draft pool runs the same "
            "weights, and is made to take part although that costs more than it brings: most of it is "
            "accepted, nothing is gained. Left to itself, the service would do without these drafts.",
            soft_wrap=True,
        )


def answer_prompts(grpc_address: str, max_tokens: int) -> list[Comparison]:
    """Run the three prompts. Raises: ServiceError."""
    with connect(grpc_address) as stub:
        try:
            # The first request pays for what every process does once.
            ask(stub, DemoPrompt("", "Hi", RequestOptions(max_tokens=8)), None, speculate=True)
            return [compare(stub, prompt) for prompt in demo_prompts(max_tokens)]
        except grpc.RpcError as error:
            raise ServiceError(describe_rpc_error(error, grpc_address)) from error
