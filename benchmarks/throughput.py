"""Many streams: adaptive, no and fixed drafts beside ``transformers`` and any OpenAI-compatible server.

All contenders get the same prompts one after the other, in an order that changes from round to round, with
the same weights, precision and threads, greedy:

    adaptive      Paceline, which chooses the tails' lengths itself
    off           the same service, each request asking for no draft tokens
    fixed         a second service whose tails always have --gamma tokens
    continuous    transformers' continuous batching
    generate      transformers' generate, one request at a time, like the next two
    assisted      transformers' assisted generation, same draft, its own choice of draft length
    lookup        transformers' prompt lookup
    openai        a server at --openai-url: vLLM, llama.cpp, SGLang, …

Prefix caches are off (the contenders share their prompts): start an OpenAI-compatible server without, too.
Tokens/s are all tokens of a load over all its time, prompts included. TTFT and TPOT are what a client sees.
"""

from __future__ import annotations

import os

# Processes take turns on the same cores: a thread that spins while it waits steals the others' time.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
os.environ.setdefault("KMP_BLOCKTIME", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import asyncio
import contextlib
import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.loads import FixedConcurrency, Load, PoissonArrivals, turns
from benchmarks.prompts import BenchPrompt, chat_texts, encoded, spec_bench
from benchmarks.report import load_average
from benchmarks.throughput_report import Cell, report

SERVICES = ("adaptive", "off", "fixed")
SINGLE = ("generate", "assisted", "lookup")
BASELINES = ("continuous", *SINGLE)
LOOKUP_TOKENS = 10
"""What ``transformers`` documents prompt lookup with."""

EXAMPLES = """\
Examples:

python -m benchmarks.throughput --quick

python -m benchmarks.throughput --rounds 5

python -m benchmarks.throughput --concurrency 8,16 --contenders adaptive,off,fixed,continuous

python -m benchmarks.throughput --concurrency "" --rates 0.2,0.4 --requests 24

python -m benchmarks.throughput --contenders off,adaptive,openai --openai-url http://127.0.0.1:8080/v1
--openai-model qwen
"""


@dataclass(frozen=True)
class Settings:
    """What is run; as in the command line."""

    model: str
    draft: str | None
    dtype: str
    contenders: tuple[str, ...]
    concurrency: tuple[int, ...]
    rates: tuple[float, ...]
    requests: int
    waves: int
    rounds: int
    max_tokens: int
    max_characters: int
    gamma: int
    ngram: bool
    kv_memory_gb: float
    seed: int
    openai_url: str | None
    openai_model: str | None

    def loads(self, round_number: int) -> list[Load]:
        fixed: list[Load] = [FixedConcurrency(count) for count in self.concurrency]
        return fixed + [PoissonArrivals(rate, self.seed + round_number) for rate in self.rates]

    def num_requests(self, load: Load) -> int:
        """Of one load in one round."""
        if isinstance(load, PoissonArrivals):
            return self.requests
        return max(load.concurrency * self.waves, min(self.requests, 4))

    def most_at_a_time(self) -> int:
        """Sequences that a contender must have room for."""
        return max(*self.concurrency, self.requests if self.rates else 1, 1)

    def service_configs(self) -> dict[str, dict[str, Any]]:
        """Services that the contenders need: one for adaptive and off, one for fixed."""
        configs: dict[str, dict[str, Any]] = {}
        if {"adaptive", "off"} & set(self.contenders):
            configs["adaptive"] = self._service_config(None)
        if "fixed" in self.contenders:
            configs["fixed"] = self._service_config(self.gamma)
        return configs

    def _service_config(self, num_speculative_tokens: int | None) -> dict[str, Any]:
        from paceline.cluster.runtime import free_port

        pool = {"kv_cache": {"memory_gb": self.kv_memory_gb}, "enable_prefix_caching": False}
        config: dict[str, Any] = {
            "model": self.model,
            "dtype": self.dtype,
            "target": pool,
            "speculation": {
                "ngram": {"enabled": self.ngram},
                "num_speculative_tokens": num_speculative_tokens,
            },
            "gateway": {"grpc_port": free_port()},
        }
        if self.draft:
            config["draft"] = {"model": self.draft, **pool}
        return config


class Pool:
    """The prompts, handed out in turn, so that every round and load has others while they last."""

    def __init__(self, prompts: Sequence[BenchPrompt]) -> None:
        self._prompts = prompts
        self._next = 0

    def take(self, count: int) -> list[BenchPrompt]:
        taken = [self._prompts[(self._next + index) % len(self._prompts)] for index in range(count)]
        self._next = (self._next + count) % len(self._prompts)
        return taken


@contextlib.asynccontextmanager
async def _contenders(
    settings: Settings, addresses: Mapping[str, str], prompts: Sequence[BenchPrompt]
) -> Any:
    """Name -> ``Contender`` of all that are wanted, ready."""
    import grpc.aio
    import httpx

    from benchmarks.contenders import OpenAIServer, PacelineService
    from benchmarks.transformers_contenders import (
        ContinuousBatching,
        TransformersGenerate,
        TransformersModels,
    )

    wanted = settings.contenders
    found: dict[str, Any] = {}
    async with contextlib.AsyncExitStack() as stack:
        for name in (name for name in SERVICES if name in wanted):
            address = addresses["fixed" if name == "fixed" else "adaptive"]
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(address))
            bound = 0 if name == "off" else None
            found[name] = PacelineService(channel, settings.max_tokens, num_speculative_tokens=bound)
        if set(BASELINES) & set(wanted):
            ids = encoded(settings.model, prompts)
            token_ids = {prompt.question_id: ids[index] for index, prompt in enumerate(prompts)}
            draft = settings.draft if "assisted" in wanted else None
            models = TransformersModels(settings.model, draft, settings.dtype, settings.max_tokens, token_ids)
            if "continuous" in wanted:
                batching = ContinuousBatching(models, settings.most_at_a_time())
                stack.callback(batching.stop)
                batching.start()
                found["continuous"] = batching
            if "generate" in wanted:
                found["generate"] = TransformersGenerate(models)
            if models.assistant is not None:
                found["assisted"] = TransformersGenerate(
                    models, speculative=True, assistant_model=models.assistant
                )
            if "lookup" in wanted:
                found["lookup"] = TransformersGenerate(
                    models, speculative=True, prompt_lookup_num_tokens=LOOKUP_TOKENS
                )
        if "openai" in wanted:
            client = await stack.enter_async_context(httpx.AsyncClient(timeout=600.0, trust_env=False))
            texts = chat_texts(settings.model, prompts)
            assert settings.openai_url is not None
            found["openai"] = OpenAIServer(
                client,
                settings.openai_url,
                settings.openai_model or settings.model,
                settings.max_tokens,
                texts,
            )
        gc.collect()
        yield {name: found[name] for name in wanted if name in found}


async def measure(settings: Settings, addresses: Mapping[str, str]) -> list[Cell]:
    """All rounds, loads and contenders, interleaved."""
    prompts = spec_bench(1000, seed=settings.seed, max_characters=settings.max_characters)
    pool = Pool(prompts)
    cells: list[Cell] = []
    async with _contenders(settings, addresses, prompts) as contenders:
        with Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total} requests"),
            TimeElapsedColumn(),
        ) as progress:
            bar = progress.add_task("warm-up", total=_total_requests(settings, contenders))
            for contender in contenders.values():
                await contender.ask(prompts[0])
            for round_number in range(settings.rounds):
                for load in settings.loads(round_number):
                    chosen = pool.take(settings.num_requests(load))
                    names = [name for name, item in contenders.items() if _can_take(item, load)]
                    for name in turns(names, round_number):
                        progress.update(
                            bar,
                            description=f"round {round_number + 1}/{settings.rounds}, {load.name}, {name}",
                        )
                        before = load_average()
                        outcome = await load.run(contenders[name].ask, chosen, lambda: progress.advance(bar))
                        cells.append(Cell(name, load, round_number, before, outcome))
    return cells


def _can_take(contender: Any, load: Load) -> bool:
    most = contender.most_at_a_time
    return most is None or (isinstance(load, FixedConcurrency) and load.concurrency <= most)


def _total_requests(settings: Settings, contenders: Mapping[str, Any]) -> int:
    return settings.rounds * sum(
        settings.num_requests(load) * sum(_can_take(item, load) for item in contenders.values())
        for load in settings.loads(0)
    )


def _numbers(text: str, option: str, kind: type) -> tuple[Any, ...]:
    """Raises: typer.BadParameter for anything but positive numbers, separated by commas."""
    try:
        values = tuple(kind(part) for part in text.split(",") if part.strip())
    except ValueError:
        values = (0,)
    if any(value <= 0 for value in values):
        raise typer.BadParameter(
            f"must be positive numbers, separated by commas; got {text!r}", param_hint=option
        )
    return values


app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(epilog=EXAMPLES)
def main(
    model: Annotated[str, typer.Option(help="The target.")] = "qwen2.5-coder-1.5b-instruct",
    draft: Annotated[str, typer.Option(help="The draft; empty: none.")] = "qwen2.5-coder-0.5b-instruct",
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    contenders: Annotated[
        str, typer.Option(help="Comma-separated; default: all, and openai where --openai-url is given.")
    ] = "",
    concurrency: Annotated[str, typer.Option(help="Requests at a time; empty: none.")] = "1,4,8,16",
    rates: Annotated[str, typer.Option(help="Open loop: requests per second (Poisson).")] = "",
    requests: Annotated[int, typer.Option(min=1, help="Requests of each open loop.")] = 24,
    waves: Annotated[int, typer.Option(min=1, help="Requests per client at a fixed concurrency.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Repetitions, with other prompts.")] = 5,
    max_tokens: Annotated[int, typer.Option(min=2, help="Longest answer.")] = 64,
    max_characters: Annotated[int, typer.Option(help="Leave out longer prompts.")] = 1500,
    gamma: Annotated[int, typer.Option(min=1, help="Draft tokens of 'fixed'.")] = 4,
    ngram: Annotated[bool, typer.Option(help="Paceline's prompt lookup beside the draft.")] = True,
    kv_memory_gb: Annotated[float, typer.Option(help="KV cache of each target and draft.")] = 0.6,
    seed: Annotated[int, typer.Option(help="Of the choice of prompts and of the arrivals.")] = 0,
    openai_url: Annotated[str | None, typer.Option(help="Such as http://127.0.0.1:8000/v1.")] = None,
    openai_model: Annotated[str | None, typer.Option(help="What that server calls the model.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A light model, few requests: minutes, to see that it works.")
    ] = False,
    name: Annotated[str, typer.Option(help="Name of the JSON file and the plot.")] = "throughput",
) -> None:
    """Tokens/s, TTFT and TPOT at fixed concurrencies and random arrivals, contenders interleaved."""
    from benchmarks.services import running_services

    known = (*SERVICES, *BASELINES, "openai")
    every = known if openai_url else known[:-1]
    wanted = tuple(part.strip() for part in contenders.split(",") if part.strip()) or every
    unknown = [part for part in wanted if part not in known]
    if unknown:
        raise typer.BadParameter(f"{unknown[0]!r} is none of {', '.join(known)}", param_hint="--contenders")
    if "openai" in wanted and not openai_url:
        raise typer.BadParameter("openai needs --openai-url", param_hint="--contenders")
    settings = Settings(
        model="smollm2-135m-instruct" if quick else model,
        draft="smollm2-135m-instruct" if quick else draft or None,
        dtype=dtype,
        contenders=wanted,
        concurrency=_numbers("1,4" if quick else concurrency, "--concurrency", int),
        rates=_numbers("1" if quick else rates, "--rates", float),
        requests=6 if quick else requests,
        waves=1 if quick else waves,
        rounds=1 if quick else rounds,
        max_tokens=32 if quick else max_tokens,
        max_characters=600 if quick else max_characters,
        gamma=gamma,
        ngram=ngram,
        kv_memory_gb=kv_memory_gb,
        seed=seed,
        openai_url=openai_url,
        openai_model=openai_model,
    )
    if not settings.concurrency and not settings.rates:
        raise typer.BadParameter("nothing to run: give --concurrency or --rates", param_hint="--concurrency")
    with running_services(settings.service_configs()) as addresses:
        cells = asyncio.run(measure(settings, addresses))
    report(cells, name, vars(settings))


if __name__ == "__main__":
    app()
