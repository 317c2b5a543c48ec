"""The command line without Ray: options to requests, streams to terminals, errors to sentences."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path

import grpc
import pytest
from rich.console import Console
from typer.testing import CliRunner

from paceline.cluster import cli
from paceline.cluster.cli_chunks import ChoicePrinter, chunk_printer
from paceline.cluster.cli_demo import Answer, Comparison, comparison_table, demo_config, demo_prompts
from paceline.cluster.cli_output import describe_rpc_error, show_bytes, show_share
from paceline.cluster.cli_request import (
    RequestOptions,
    build_request,
    parse_bias,
    split_by_token,
    statistics_line,
    text_or_file,
)
from paceline.cluster.cli_serve import describe_pool, merged_config
from paceline.cluster.cli_status import show_gain, status_view
from paceline.cluster.client import Timing, connect, stream
from paceline.cluster.config_errors import ConfigError
from paceline.cluster.runtime import PoolProgress, RuntimeStartError, free_port, port_is_free
from paceline.cluster.service_start import required_cpus, serving
from paceline.protos import generation_pb2 as proto
from paceline.protos import generation_pb2_grpc as rpc

WORDS = ("Once", " upon", " a", " time")


class ScriptedService(rpc.GenerationServiceServicer):
    """Answers every request with four tokens in two chunks; remembers what it was asked."""

    def __init__(self) -> None:
        self.requests: list[proto.GenerateRequest] = []
        self.cancelled = threading.Event()

    def Generate(  # noqa: N802
        self, request: proto.GenerateRequest, context: grpc.ServicerContext
    ) -> proto.GenerateResponse:
        self._note(request, context)
        return proto.GenerateResponse(
            request_id="r", model="scripted", seed=2**63 + 1, choices=[proto.Choice(text="".join(WORDS))]
        )

    def GenerateStream(  # noqa: N802
        self, request: proto.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[proto.GenerateChunk]:
        self._note(request, context)
        if request.sampling.n > 1:
            yield from self._choices(request.sampling.n, with_logprobs=request.HasField("logprobs"))
            return
        if request.prompt == "forever":
            # The caller may leave with the first chunk, and then this is not resumed.
            context.add_callback(self.cancelled.set)
        yield proto.GenerateChunk(text="Once", token_ids=[10], accepted=[False])
        if request.prompt == "forever":
            self.cancelled.wait(60)
            return
        yield proto.GenerateChunk(
            text=" upon a time",
            token_ids=[11, 12, 13],
            accepted=[True, True, False],
            finish_reason=proto.FINISH_REASON_LENGTH,
            usage=proto.Usage(prompt_tokens=2, completion_tokens=4),
            speculation=proto.SpeculationStats(
                rounds=1, draft_tokens=4, accepted_tokens=2, mean_acceptance_length=3.0
            ),
            seed=5,
        )

    def _choices(self, n: int, *, with_logprobs: bool) -> Iterator[proto.GenerateChunk]:
        """Interleaved; the first choice ends last."""
        for number, word in enumerate(WORDS):
            for index in reversed(range(n)):
                if number > n - index:
                    continue
                chunk = proto.GenerateChunk(index=index, text=f"{word}{index}", token_ids=[10 + number])
                if with_logprobs:
                    entry = proto.TokenLogprob(token_id=10 + number, logprob=-0.5 * number, text=word)
                    other = proto.TokenLogprob(token_id=5, logprob=-9.25, text="[b]x")
                    chunk.logprobs.add(chosen=entry, top=[entry, other])
                if number == min(n - index, len(WORDS) - 1):
                    chunk.finish_reason = proto.FINISH_REASON_STOP if index else proto.FINISH_REASON_LENGTH
                    chunk.usage.completion_tokens = number + 1
                    chunk.speculation.rounds = 1
                    chunk.speculation.draft_tokens = 2
                    chunk.speculation.accepted_tokens = index % 2
                    chunk.seed = 100 + index
                yield chunk

    def Tokenize(  # noqa: N802
        self, request: proto.TokenizeRequest, context: grpc.ServicerContext
    ) -> proto.TokenizeResponse:
        words = {" upon": 11, " a": 12, " time": 13}
        return proto.TokenizeResponse(token_ids=words.values(), tokens=words)

    def _note(self, request: proto.GenerateRequest, context: grpc.ServicerContext) -> None:
        self.requests.append(request)
        if request.sampling.temperature < 0:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "sampling.temperature: must be in [0, 100]")


@pytest.fixture
def scripted() -> Iterator[tuple[ScriptedService, str]]:
    service = ScriptedService()
    server = grpc.server(futures.ThreadPoolExecutor(4))
    rpc.add_GenerationServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield service, f"127.0.0.1:{port}"
    server.stop(None).wait()


def run(*arguments: str, stdin: str | None = None) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the command line in a process of its own."""
    found = subprocess.run(
        [sys.executable, "-m", "paceline.cluster.cli", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return found.returncode, found.stdout, found.stderr


@pytest.mark.parametrize(
    "command", [[], ["serve"], ["generate"], ["status"], ["models"], ["models", "pull"], ["demo"]]
)
def test_every_command_has_help_with_an_example(command: list[str]) -> None:
    result = CliRunner().invoke(cli.app, [*command, "--help"])
    assert result.exit_code == 0
    assert "paceline" in result.output
    assert "Example" in result.output or "Start with" in result.output


def test_command_line_starts_without_torch_and_ray() -> None:
    heavy = "{'torch', 'ray', 'transformers'}"
    code = f"import sys, paceline.cluster.cli; sys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_generate_pipes_text_alone_and_statistics_to_stderr(scripted: tuple[ScriptedService, str]) -> None:
    service, address = scripted
    code, out, err = run(
        *("generate", "Tell", "--address", address, "--temperature", "0", "--top-k", "3", "--top-p", "0.5"),
        *("--min-p", "0.1", "--seed", str(2**64 - 1), "--max-tokens", "4", "--stop", "X", "--stop", "Y"),
        *("--num-speculative-tokens", "3"),
    )
    assert (code, out) == (0, "Once upon a time\n")
    assert "4 tokens" in err
    assert "2 of 4 draft tokens accepted (50%)" in err
    assert "mean acceptance length 3.00" in err
    assert "seed 5" in err
    (request,) = service.requests
    assert request.prompt == "Tell"
    assert request.sampling.HasField("temperature")
    assert request.sampling.temperature == 0
    assert request.sampling.top_k == 3
    assert request.sampling.top_p == 0.5
    assert request.sampling.min_p == pytest.approx(0.1)
    assert request.sampling.seed == 2**64 - 1
    assert request.stopping.max_tokens == 4
    assert list(request.stopping.stop) == ["X", "Y"]
    assert request.speculation.num_speculative_tokens == 3


def test_generate_reads_stdin_as_a_conversation(scripted: tuple[ScriptedService, str]) -> None:
    service, address = scripted
    code, _, _ = run("generate", "-", "--chat", "--system", "Be brief.", "-a", address, stdin="a\nb")
    assert code == 0
    turns = [(turn.role, turn.content) for turn in service.requests[0].conversation.messages]
    assert turns == [("system", "Be brief."), ("user", "a\nb")]
    assert not service.requests[0].speculation.HasField("num_speculative_tokens")


def test_generate_json_is_one_line_with_a_whole_seed(scripted: tuple[ScriptedService, str]) -> None:
    service, address = scripted
    code, out, err = run("generate", "Tell", "--json", "--no-speculation", "-a", address)
    assert (code, err) == (0, "")
    answer = json.loads(out)
    assert out.count("\n") == 1
    assert answer["choices"][0]["text"] == "".join(WORDS)
    assert answer["seed"] == 2**63 + 1
    assert answer["seconds"] > 0
    assert service.requests[0].speculation.HasField("num_speculative_tokens")
    assert service.requests[0].speculation.num_speculative_tokens == 0


def test_generate_carries_every_option_of_the_sampling_surface(
    scripted: tuple[ScriptedService, str], tmp_path: Path
) -> None:
    service, address = scripted
    grammar = tmp_path / "list.lark"
    grammar.write_text('start: "a"+')
    code, _, _ = run(
        *("generate", "Tell", "-a", address, "--n", "2", "--logprobs", "3", "--min-tokens", "2"),
        *("--repetition-penalty", "1.25", "--presence-penalty", "-1", "--frequency-penalty", "0.5"),
        *("--logit-bias", "198=-100", "--logit-bias", "5=0.25", "--grammar", str(grammar)),
        *("--verification", "block", "--priority", "-3", "--timeout", "60"),
    )
    assert code == 0
    (request,) = service.requests
    assert (request.priority, request.timeout_s) == (-3, 60.0)
    sampling = request.sampling
    assert (sampling.n, request.logprobs, request.stopping.min_tokens) == (2, 3, 2)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (
        1.25,
        -1.0,
        0.5,
    )
    assert dict(sampling.logit_bias) == {198: -100.0, 5: 0.25}
    assert request.constraint.grammar == 'start: "a"+'
    assert request.speculation.verification == proto.VERIFICATION_RULE_BLOCK


def test_what_is_not_asked_for_is_not_sent() -> None:
    request = build_request("Tell", RequestOptions())
    assert not request.HasField("logprobs")
    assert not request.HasField("timeout_s")
    assert not request.HasField("constraint")
    assert not request.sampling.HasField("repetition_penalty")
    assert request.speculation.verification == proto.VERIFICATION_RULE_UNSPECIFIED


def test_each_constraint_reaches_its_field() -> None:
    options = [
        RequestOptions(json_schema="{}"),
        RequestOptions(regex="a|b"),
        RequestOptions(choice=("yes", "no")),
    ]
    schema, regex, choice = (build_request("x", item).constraint for item in options)
    assert (schema.json_schema, regex.regex) == ("{}", "a|b")
    assert list(choice.choice.values) == ["yes", "no"]
    with pytest.raises(ValueError, match="one constraint"):
        build_request("x", RequestOptions(regex="a", choice=("b",)))


def test_a_schema_is_a_file_or_json(tmp_path: Path) -> None:
    path = tmp_path / "schema.json"
    path.write_text('{"type": "null"}')
    assert text_or_file(str(path)) == '{"type": "null"}'
    assert text_or_file(' {"type": "number"}') == ' {"type": "number"}'
    assert text_or_file("true") == "true"
    with pytest.raises(ValueError, match=r"cannot read .*missing.json'"):
        text_or_file(str(tmp_path / "missing.json"))
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="UTF-8"):
        text_or_file(str(path))


@pytest.mark.parametrize("entry", ["198", "=5", "a=5", "198=", "198=x", "1.5=2"])
def test_a_bias_that_is_none_is_shown_one(entry: str) -> None:
    assert parse_bias(["198=-100", "0=1e1"]) == ((198, -100.0), (0, 10.0))
    with pytest.raises(ValueError, match="ID=VALUE"):
        parse_bias([entry])


def test_choices_are_printed_one_after_the_other(scripted: tuple[ScriptedService, str]) -> None:
    """They come interleaved, and the first one ends last."""
    code, out, err = run("generate", "Tell", "--n", "3", "-a", scripted[1])
    assert code == 0
    assert out.splitlines() == [
        *("choice 0", "Once0 upon0 a0 time0", "4 tokens (length) · seed 100", ""),
        *("choice 1", "Once1 upon1 a1", "3 tokens (stop) · seed 101", ""),
        *("choice 2", "Once2 upon2", "2 tokens (stop) · seed 102", ""),
    ]
    assert "9 tokens in" in err
    assert "(length, stop)" in err
    assert "1 of 6 draft tokens accepted (17%) · mean acceptance length 1.33 · seed 100" in err


def test_the_first_choice_is_printed_live_and_the_others_in_their_turn() -> None:
    shown: list[int] = []
    console = Console(width=100, file=sys.stdout)
    with console.capture():
        printer = ChoicePrinter(console, lambda chunk: shown.append(chunk.token_ids[0]), several=True)
        for index, token_id, ends in [(1, 20, 0), (0, 10, 0), (1, 21, 1), (0, 11, 0), (0, 12, 1)]:
            printer(proto.GenerateChunk(index=index, token_ids=[token_id], finish_reason=ends))
            assert shown == {20: [], 10: [10], 21: [10], 11: [10, 11]}.get(token_id, shown)
    assert shown == [10, 11, 12, 20, 21]
    assert [final.index for final in printer.finals] == [0, 1]


def test_logprobs_are_a_table_below_their_choice(scripted: tuple[ScriptedService, str]) -> None:
    _, out, _ = run("generate", "Tell", "--n", "2", "--logprobs", "2", "-a", scripted[1])
    first = out.split("choice 1")[0].splitlines()
    assert [line.split() for line in first[2:6]] == [
        ["token", "id", "logprob", "likeliest"],
        ["'Once'", "10", "0.000", "'Once'", "0.000", "'[b]x'", "-9.250"],
        ["'", "upon'", "11", "-0.500", "'", "upon'", "-0.500", "'[b]x'", "-9.250"],
        ["'", "a'", "12", "-1.000", "'", "a'", "-1.000", "'[b]x'", "-9.250"],
    ]


@pytest.mark.parametrize("mode", [(), ("--json",)])
def test_refused_request_is_one_sentence_and_exit_1(
    scripted: tuple[ScriptedService, str], mode: tuple[str, ...]
) -> None:
    code, out, err = run("generate", "Tell", "--temperature", "-1", "-a", scripted[1], *mode)
    assert code == 1
    assert out == ""
    assert err.strip() == "error: INVALID_ARGUMENT: sampling.temperature: must be in [0, 100]"


def test_no_service_names_the_remedy() -> None:
    code, _, err = run("generate", "Tell", "-a", f"127.0.0.1:{free_port()}")
    assert code == 1
    assert "paceline serve" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["generate", "x", "--no-speculation", "--num-speculative-tokens", "2"], "--no-speculation"),
        (["generate", "x", "--system", "s"], "--chat"),
        (["generate", "x", "--seed", str(2**64)], "'--seed'"),
        (["generate", "x", "--seed", "-1"], "'--seed'"),
        (["generate", "x", "--top-k", str(2**40)], "range"),
        (["generate", "x", "--logit-bias", "5"], "ID=VALUE"),
        (["generate", "x", "--grammar", "/nowhere/x.lark"], "cannot read"),
        (["generate", "x", "--regex", "a", "--choice", "b"], "one constraint"),
        (["generate", "x", "--verification", "typical"], "coupled"),
        (["serve"], "--model"),
    ],
)
def test_impossible_options_are_usage_errors(arguments: list[str], told: str) -> None:
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 2
    assert told in result.output


def test_terminal_colours_each_token_by_acceptance(scripted: tuple[ScriptedService, str]) -> None:
    service, address = scripted
    console = Console(force_terminal=True, color_system="standard", width=200, file=sys.stdout)
    with connect(address) as stub, console.capture() as captured:
        printer = chunk_printer(console, stub, "", show_tokens=False)
        final, timing = stream(stub, build_request("Tell", RequestOptions()), printer)
    green, yellow, reset = "\x1b[32m", "\x1b[33m", "\x1b[0m"
    assert captured.get() == (f"{yellow}Once{reset}{green} upon{reset}{green} a{reset}{yellow} time{reset}")
    assert final.finish_reason == proto.FINISH_REASON_LENGTH
    assert timing.num_tokens == 4
    assert timing.num_first == 1
    assert 0 < timing.first_token <= timing.last_token
    assert len(service.requests) == 1


def test_show_tokens_marks_accepted_ids(scripted: tuple[ScriptedService, str]) -> None:
    _, out, _ = run("generate", "Tell", "--show-tokens", "-a", scripted[1])
    assert out == "=10 +11 +12 =13 \n"


def test_stream_that_is_left_is_cancelled(scripted: tuple[ScriptedService, str]) -> None:
    service, address = scripted

    def leave(chunk: proto.GenerateChunk) -> None:
        raise KeyboardInterrupt

    with connect(address) as stub, pytest.raises(KeyboardInterrupt):
        stream(stub, build_request("forever", RequestOptions()), leave)
    assert service.cancelled.wait(30)


@pytest.mark.parametrize(
    ("text", "token_ids", "encoded", "pieces"),
    [
        ("ab", [1, 2], ([1, 2], ["a", "b"]), ["a", "b"]),
        ("ab", [1, 2], ([0, 1, 2], ["<s>", "a", "b"]), ["a", "b"]),
        ("ab", [3], ([1, 2], ["a", "b"]), None),
        ("ab", [1, 2], ([12], ["ab"]), None),
        ("é", [1, 2], ([1, 2], ["\ufffd", "\ufffd"]), None),
    ],
)
def test_split_by_token_cuts_only_where_it_is_certain(
    text: str, token_ids: list[int], encoded: tuple[list[int], list[str]], pieces: list[str] | None
) -> None:
    assert split_by_token(text, token_ids, *encoded) == pieces


def test_timing_counts_after_the_first_chunk() -> None:
    timing = Timing(first_token=1.0, last_token=3.0, num_first=2, num_tokens=12)
    assert timing.decode_tokens_per_second == 5.0
    assert timing.tokens_per_second == 4.0
    assert Timing(0.0, 0.0, 0, 0).tokens_per_second == 0.0
    assert Timing(1.0, 1.0, 1, 1).decode_tokens_per_second == 0.0


def test_statistics_line_without_drafts() -> None:
    final = proto.GenerateChunk(
        usage=proto.Usage(completion_tokens=1), finish_reason=proto.FINISH_REASON_STOP, seed=9
    )
    line = statistics_line(Timing(0.1, 0.1, 1, 1), [final])
    assert "1 tokens in 0.10 s (stop)" in line
    assert "no draft tokens" in line


def test_options_lie_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "paceline.yaml"
    path.write_text("model: a\ndraft: b\ngateway: {grpc_port: 9001, max_ongoing_requests: 7}\n")
    overrides = {"model": None, "draft.model": "c", "draft.num_replicas": 3, "gateway.grpc_port": 9100}
    config = merged_config(path, overrides)
    assert config.model == "a"
    assert config.draft is not None
    assert (config.draft.model, config.draft.num_replicas) == ("c", 3)
    assert (config.gateway.grpc_port, config.gateway.max_ongoing_requests) == (9100, 7)
    assert merged_config(path, {"model": None}).gateway.grpc_port == 9001
    with pytest.raises(ConfigError, match=r"draft.model: is missing"):
        merged_config(None, {"model": "a", "draft.num_replicas": 2})


def test_serve_reports_a_wrong_file_and_a_missing_model(tmp_path: Path) -> None:
    path = tmp_path / "paceline.yaml"
    path.write_text("model: a\ndarft: b\n")
    code, _, err = run("serve", str(path))
    assert code == 1
    assert "darft: unknown key — did you mean draft?" in err
    code, _, err = run("serve", "--model", str(tmp_path / "nowhere.gguf"))
    assert code == 1
    assert "no such file" in err
    assert "Traceback" not in err


def test_serve_refuses_a_busy_port_before_it_starts_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    server = grpc.server(futures.ThreadPoolExecutor(1), options=[("grpc.so_reuseport", 0)])
    port = server.add_insecure_port("0.0.0.0:0")
    server.start()
    try:
        assert not port_is_free(port)
        config = merged_config(None, {"model": "emulated://m", "gateway.grpc_port": port})
        with pytest.raises(RuntimeStartError, match="--port"), serving(config, address="local"):
            pass
    finally:
        server.stop(None).wait()
    assert port_is_free(port)


def test_own_ray_has_room_for_every_replica() -> None:
    content = {"model": "m", "target.num_replicas": 40, "target.ray_actor_options.num_cpus": 2.0}
    assert required_cpus(merged_config(None, content)) >= 80


def test_rpc_errors_in_words(scripted: tuple[ScriptedService, str]) -> None:
    with connect(scripted[1]) as stub, pytest.raises(grpc.RpcError) as raised:
        stub.GetModelInfo(proto.GetModelInfoRequest())
    assert "not a Paceline service" in describe_rpc_error(raised.value, "here:1")


def test_pool_progress_in_words() -> None:
    assert (
        describe_pool(PoolProgress("target", 1, {"STARTING": 2}, True, "")) == "target: 1 running, 2 starting"
    )
    assert describe_pool(PoolProgress("draft", 0, {}, True, "")) == "draft: waiting"


def test_demo_shows_the_catalogues_pair_or_says_that_there_is_none() -> None:
    from paceline.actors.weight_catalog import CATALOG

    for model in CATALOG.values():
        config = demo_config(model, 9123)
        assert config.draft is not None
        assert config.draft.model == (model.draft or model.name)
        assert config.gateway.grpc_port == 9123
    kinds = {prompt.name: prompt.options for prompt in demo_prompts(8)}
    assert kinds["greedy"].temperature == 0
    assert kinds["sampled"].temperature
    assert kinds["sampled"].seed is not None
    assert kinds["chat"].chat


def test_comparison_table_tells_a_difference() -> None:
    speculation = proto.SpeculationStats(
        rounds=2, draft_tokens=4, accepted_tokens=3, mean_acceptance_length=2.5
    )
    drafted = Answer((1, 2, 3), Timing(1.0, 2.0, 1, 3), proto.GenerateChunk(speculation=speculation))
    plain = Answer((1, 2, 3), Timing(1.0, 3.0, 1, 3), proto.GenerateChunk())
    other = Answer((1, 9, 3), Timing(1.0, 3.0, 1, 3), proto.GenerateChunk())
    console = Console(width=200, file=sys.stdout)
    with console.capture() as captured:
        console.print(comparison_table([Comparison("x", drafted, plain), Comparison("y", drafted, other)]))
    same, different = captured.get().splitlines()[-2:]
    assert same.split() == ["x", "3", "1.0", "2.0", "2.00×", "75%", "2.50", "yes"]
    assert different.split()[-2:] == ["first", "1"]


def test_status_view_before_any_request() -> None:
    engine = {
        "num_running": 0, "num_waiting": 0, "free_blocks": 8, "total_blocks": 8,
        "num_committed_tokens_total": 0, "num_draft_tokens_total": 0, "num_accepted_tokens_total": 0,
        "num_rounds_total": 0, "step_seconds": 0.0,
        "num_lookup_tokens_total": 0, "num_accepted_lookup_tokens_total": 0,
        "num_prefix_cache_queries_total": 0, "num_prefix_cache_hits_total": 0,
        "drafting_gain": 0.0, "drafts_rest": False,
    }  # fmt: skip
    target = {"id": "t", "pid": 1, "drafts": [], "error": "", "engine": engine}
    broken = {"id": "u", "pid": 2, "drafts": [], "error": "out of memory"}
    pools = {
        "target": {
            "running": 1,
            "other": {"STARTING": 1},
            "num_silent": 1,
            "message": "",
            "replicas": [target, broken],
        }
    }
    console = Console(width=200, file=sys.stdout)
    with console.capture() as captured:
        console.print(status_view({"status": "RUNNING", "message": "", "pools": pools}))
    text = captured.get()
    assert "service running" in text
    assert "1 starting" in text
    assert "nan" not in text.lower()
    assert "out of memory" in text


def test_the_gain_of_drafting_in_words() -> None:
    assert show_gain({"drafting_gain": 0.0, "drafts_rest": False}) == "–"
    assert show_gain({"drafting_gain": 1.456, "drafts_rest": False}) == "1.46"
    assert show_gain({"drafting_gain": 0.9, "drafts_rest": True}) == "0.90, at rest"


def test_numbers_in_words() -> None:
    assert [show_bytes(n) for n in (0, 999, 1500, 491_400_064, 3_400_000_000)] == [
        "0 B",
        "999 B",
        "1.5 kB",
        "491.4 MB",
        "3.40 GB",
    ]
    assert show_share(1, 4) == "25%"
    assert show_share(0, 0) == "–"
