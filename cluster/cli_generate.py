"""``paceline generate``: one request, streamed to the terminal."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Annotated

import grpc
import typer
from google.protobuf.json_format import MessageToDict
from rich.console import Console
from rich.text import Text

from paceline.cluster.cli_output import describe_rpc_error, stderr, stdout
from paceline.cluster.cli_request import (
    RequestOptions,
    build_request,
    split_by_token,
    statistics_line,
)
from paceline.cluster.client import DEFAULT_ADDRESS, ServiceError, connect, stream
from paceline.protos import generation_pb2 as proto
from paceline.protos import generation_pb2_grpc as rpc

ACCEPTED_STYLE = "green"
OWN_STYLE = "yellow"

EPILOG = """\
Examples:

paceline generate "def fibonacci(n):" --temperature 0 --max-tokens 64

paceline generate "Write a haiku on tailwind" --chat --seed 7

paceline generate "Count to ten" --chat --no-speculation --json

git diff | paceline generate - --chat --system "Summarise this change."

On a terminal, [green]green[/] is a draft token that was accepted, [yellow]yellow[/] the target's own
corrected or bonus token. Statistics go to stderr.
"""


def chunk_printer(
    console: Console, stub: rpc.GenerationServiceStub, model: str, *, show_tokens: bool
) -> Callable[[proto.GenerateChunk], None]:
    """Prints each chunk as it comes: coloured by acceptance on a terminal, bare text elsewhere."""

    def show_plain(chunk: proto.GenerateChunk) -> None:
        sys.stdout.write(chunk.text)
        sys.stdout.flush()

    def show_coloured(chunk: proto.GenerateChunk) -> None:
        for piece, accepted in _pieces(stub, model, chunk):
            console.print(
                Text(piece, style=ACCEPTED_STYLE if accepted else OWN_STYLE), end="", soft_wrap=True
            )

    def show_ids(chunk: proto.GenerateChunk) -> None:
        for token_id, accepted in zip(chunk.token_ids, chunk.accepted, strict=False):
            style = ACCEPTED_STYLE if accepted else OWN_STYLE
            mark = "+" if accepted else "="
            console.print(Text(f"{mark}{token_id} ", style=style), end="", soft_wrap=True)

    if show_tokens:
        return show_ids
    return show_coloured if console.is_terminal and console.color_system else show_plain


def _pieces(
    stub: rpc.GenerationServiceStub, model: str, chunk: proto.GenerateChunk
) -> Iterator[tuple[str, bool]]:
    """A chunk's text as (piece, accepted). A chunk that mixes both is cut at its tokens, which the
    service's tokeniser is asked for; where the cut is not certain the piece counts as its majority."""
    accepted = list(chunk.accepted)
    if len(set(accepted)) > 1 and chunk.text:
        try:
            encoded = stub.Tokenize(proto.TokenizeRequest(model=model, prompt=chunk.text), timeout=5)
        except grpc.RpcError:
            encoded = proto.TokenizeResponse()
        texts = split_by_token(chunk.text, chunk.token_ids, encoded.token_ids, encoded.tokens)
        if texts is not None:
            yield from zip(texts, accepted, strict=True)
            return
    yield chunk.text, bool(accepted) and sum(accepted) * 2 >= len(accepted)


def _print_json(stub: rpc.GenerationServiceStub, request: proto.GenerateRequest) -> None:
    started = time.monotonic()
    response = stub.Generate(request)
    answer = MessageToDict(
        response, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    # A 64-bit integer is a string in protobuf's JSON; tools that read one line of JSON want a number.
    answer["seed"] = response.seed
    answer["seconds"] = round(time.monotonic() - started, 4)
    sys.stdout.write(json.dumps(answer, ensure_ascii=False) + "\n")


def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; '-' reads it from stdin.")],
    address: Annotated[
        str, typer.Option("--address", "-a", envvar="PACELINE_ADDRESS", help="The service, host:port.")
    ] = DEFAULT_ADDRESS,
    model: Annotated[str, typer.Option(help="Name of the served model; empty: the one there is.")] = "",
    chat: Annotated[bool, typer.Option("--chat", help="Apply the model's chat template.")] = False,
    system: Annotated[str | None, typer.Option(help="System message, with --chat.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens to generate.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 = greedy. Default 1.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample among the k likeliest tokens; 0 = off.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample within this probability mass.")] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Drop tokens below this share of the likeliest.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same output.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="End before this string; may be given repeatedly.")
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on past the end-of-sequence token.")
    ] = False,
    num_speculative_tokens: Annotated[
        int | None, typer.Option(help="Most draft tokens verified in one step; default: adaptive.")
    ] = None,
    no_speculation: Annotated[
        bool, typer.Option("--no-speculation", help="Decode without draft tokens; same output.")
    ] = False,
    show_tokens: Annotated[
        bool, typer.Option("--show-tokens", help="Print token ids instead of text: +accepted, =own.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the whole response as one line of JSON.")
    ] = False,
) -> None:
    """Send one prompt to a running service and stream the answer."""
    if no_speculation and num_speculative_tokens:
        raise typer.BadParameter("--no-speculation excludes --num-speculative-tokens")
    if system is not None and not chat:
        raise typer.BadParameter("--system needs --chat")
    options = RequestOptions(
        model=model,
        chat=chat,
        system=system,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        max_tokens=max_tokens,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
        num_speculative_tokens=0 if no_speculation else num_speculative_tokens,
    )
    try:
        request = build_request(sys.stdin.read() if prompt == "-" else prompt, options)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    with connect(address) as stub:
        try:
            if as_json:
                _print_json(stub, request)
                return
            console = stdout()
            printer = chunk_printer(console, stub, model, show_tokens=show_tokens)
            final, timing = stream(stub, request, printer)
        except grpc.RpcError as error:
            raise ServiceError(describe_rpc_error(error, address)) from error
        sys.stdout.write("\n")
        line = statistics_line(timing, final.usage, final.speculation, final.finish_reason, final.seed)
        stderr().print(line, style="dim", soft_wrap=True)
