"""``paceline generate``: one request, streamed to the terminal."""

from __future__ import annotations

import json
import sys
import time
from typing import Annotated

import grpc
import typer
from google.protobuf.json_format import MessageToDict

from paceline.actors.engine.parameters import VerificationRule
from paceline.cluster.cli_chunks import ChoicePrinter, chunk_printer
from paceline.cluster.cli_output import describe_rpc_error, stderr, stdout
from paceline.cluster.cli_request import (
    RequestOptions,
    build_request,
    parse_bias,
    statistics_line,
    text_of_file,
    text_or_file,
)
from paceline.cluster.client import DEFAULT_ADDRESS, ServiceError, connect, rpc_timeout, stream
from paceline.protos import generation_pb2 as proto
from paceline.protos import generation_pb2_grpc as rpc

EPILOG = """\
Examples:

paceline generate "def fibonacci(n):" --temperature 0 --max-tokens 64

paceline generate "Write a haiku on tailwind" --chat --seed 7

paceline generate "Count to ten" --chat --no-speculation --json

paceline generate "Name a mountain" --chat --n 3 --logprobs 2

paceline generate "Is water wet?" --chat --choice yes --choice no

paceline generate "A point" --chat --json-schema '{"type":"object","properties":{"x":{"type":"number"}}}'

paceline generate "It was" --frequency-penalty 0.5 --logit-bias 198=-100 --verification block

git diff | paceline generate - --chat --system "Summarise this change."

On a terminal, [green]green[/] is a draft token that was accepted, [yellow]yellow[/] the target's own
corrected or bonus token. Statistics go to stderr.
"""


def _print_json(stub: rpc.GenerationServiceStub, request: proto.GenerateRequest) -> None:
    started = time.monotonic()
    response = stub.Generate(request, timeout=rpc_timeout(request))
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
    seed: Annotated[int | None, typer.Option(min=0, max=2**64 - 1, help="Same seed, same output.")] = None,
    n: Annotated[int | None, typer.Option("--n", help="Number of choices; each has its own seed.")] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Above 1: avoid tokens of prompt and answer.")
    ] = None,
    presence_penalty: Annotated[
        float | None, typer.Option(help="Above 0: avoid tokens that the answer has.")
    ] = None,
    frequency_penalty: Annotated[
        float | None, typer.Option(help="Above 0: avoid tokens that the answer has often.")
    ] = None,
    logit_bias: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ID=VALUE",
            help="Add to a token's logit; -100 forbids it, 100 allows no other. May be given repeatedly.",
        ),
    ] = None,
    min_tokens: Annotated[int | None, typer.Option(help="No end before so many tokens.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="End before this string; may be given repeatedly.")
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on past the end-of-sequence token.")
    ] = False,
    json_schema: Annotated[
        str | None, typer.Option(metavar="FILE|TEXT", help="The answer is JSON of this schema.")
    ] = None,
    regex: Annotated[str | None, typer.Option(help="The answer matches this regular expression.")] = None,
    choice: Annotated[
        list[str] | None, typer.Option(help="The answer is one of these; may be given repeatedly.")
    ] = None,
    grammar: Annotated[
        str | None, typer.Option(metavar="FILE", help="The answer follows this Lark grammar.")
    ] = None,
    logprobs: Annotated[
        int | None, typer.Option(help="Show each token's log probability, and so many of the likeliest.")
    ] = None,
    num_speculative_tokens: Annotated[
        int | None, typer.Option(help="Most draft tokens verified in one step; default: adaptive.")
    ] = None,
    no_speculation: Annotated[
        bool, typer.Option("--no-speculation", help="Decode without draft tokens; same output.")
    ] = False,
    verification: Annotated[
        VerificationRule | None, typer.Option(help="How draft tokens are accepted; default: the service's.")
    ] = None,
    priority: Annotated[
        int | None, typer.Option(help="Lower = served earlier where requests queue; default 0.")
    ] = None,
    timeout: Annotated[float | None, typer.Option(help="Give up after so many seconds.")] = None,
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
    try:
        options = RequestOptions(
            model=model,
            chat=chat,
            system=system,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            n=n,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            logit_bias=parse_bias(logit_bias or ()),
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            stop=tuple(stop or ()),
            ignore_eos=ignore_eos,
            logprobs=logprobs,
            json_schema=text_or_file(json_schema) if json_schema is not None else None,
            regex=regex,
            choice=tuple(choice or ()),
            grammar=text_of_file(grammar) if grammar is not None else None,
            num_speculative_tokens=0 if no_speculation else num_speculative_tokens,
            verification=verification,
            priority=priority,
            timeout_s=timeout,
        )
        request = build_request(sys.stdin.read() if prompt == "-" else prompt, options)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    with connect(address) as stub:
        try:
            if as_json:
                _print_json(stub, request)
                return
            console = stdout()
            printer = ChoicePrinter(
                console, chunk_printer(console, stub, model, show_tokens=show_tokens), several=(n or 1) > 1
            )
            _, timing = stream(stub, request, printer)
        except grpc.RpcError as error:
            raise ServiceError(describe_rpc_error(error, address)) from error
        stderr().print(statistics_line(timing, printer.finals), style="dim", soft_wrap=True)
