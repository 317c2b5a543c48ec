"""What the service exports: every metric's name, kind and help, and which figure it shows.

Ray puts ``ray_`` before the names, and ``_total`` behind those of counters: ``ray_paceline_failovers_total``.
What follows ``paceline_`` is vLLM's name where it means the same. Serve adds the tags ``application``,
``deployment`` and ``replica``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from paceline.actors.engine.draft_engine import DraftSnapshot
from paceline.actors.engine.target_output import TargetSnapshot
from paceline.cluster.autoscaling_reports import kv_cache_usage

PREFIX = "paceline_"

LATENCY_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)


class Kind(Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric as it is exported."""

    suffix: str
    """Its name after ``paceline_``."""
    kind: Kind
    help: str
    tag_keys: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets, in its unit."""

    @property
    def name(self) -> str:
        return PREFIX + self.suffix

    @property
    def series(self) -> str:
        """What Prometheus calls it; for a histogram with ``_bucket``, ``_sum`` or ``_count`` behind it."""
        return f"ray_{self.name}_total" if self.kind is Kind.COUNTER else f"ray_{self.name}"


@dataclass(frozen=True, slots=True)
class Sample:
    """A gauge's value, or a counter's total since its replica began."""

    metric: Metric
    value: float
    tags: Mapping[str, str] = field(default_factory=dict)


def _counter(suffix: str, help: str, *tag_keys: str) -> Metric:
    return Metric(suffix, Kind.COUNTER, help, tag_keys)


def _gauge(suffix: str, help: str) -> Metric:
    return Metric(suffix, Kind.GAUGE, help)


# ---------------------------------------------------------------------- targets

REQUESTS_RUNNING = _gauge("num_requests_running", "Sequences that a target computes.")
REQUESTS_WAITING = _gauge("num_requests_waiting", "Sequences that wait at a target for their place.")
QUEUE_SECONDS = _gauge(
    "oldest_waiting_seconds", "How long the sequence has been waiting at a target that has waited longest."
)
KV_CACHE_USAGE = _gauge(
    "kv_cache_usage_perc",
    "Share of a target's KV blocks that live sequences hold, 0 to 1. Blocks that only the prefix cache keeps "
    "are free.",
)
DRAFTS_ATTACHED = _gauge("drafts_attached", "Drafts that are attached to a target.")
SEQUENCES_WANTING_DRAFT = _gauge(
    "sequences_wanting_draft",
    "Running sequences for which a draft pays at a target's load, those that have one included.",
)
SEQUENCES_DRAFTED = _gauge("sequences_drafted", "Running sequences that have a draft.")
STEP_SECONDS = _gauge("step_time_seconds", "Time of a target's last step.")
DRAFT_RESPONSE_SECONDS = _gauge(
    "draft_response_time_seconds",
    "Median time from a verdict to the candidates that answer it, of the slowest draft attached to a target.",
)
PROMPT_TOKENS = _counter(
    "prompt_tokens",
    "Tokens of sequences submitted to a target; for one that is resumed, its completion so far as well.",
)
GENERATION_TOKENS = _counter("generation_tokens", "Completion tokens that a target committed.")
COMPUTED_TOKENS = _counter(
    "computed_tokens", "Tokens that a target computed, rejected tails and recomputation included."
)
ENGINE_STEPS = _counter("engine_steps", "Steps of a target.")
SPEC_DECODE_NUM_DRAFTS = _counter(
    "spec_decode_num_drafts",
    "Rounds: steps of a sequence that verified at least one draft token. Mean acceptance length = 1 + "
    "accepted tokens / rounds, where the 1 is the corrected or bonus token.",
)
SPEC_DECODE_NUM_DRAFT_TOKENS = _counter(
    "spec_decode_num_draft_tokens", "Draft tokens verified, from drafts and from prompt lookup."
)
SPEC_DECODE_NUM_ACCEPTED_TOKENS = _counter(
    "spec_decode_num_accepted_tokens",
    "Draft tokens that verification accepted. Never includes the corrected or bonus token.",
)
SPEC_DECODE_NUM_ACCEPTED_TOKENS_PER_POS = _counter(
    "spec_decode_num_accepted_tokens_per_pos",
    "The same by the token's position in its tail, from 0. Never includes the corrected or bonus token.",
    "position",
)
LOOKUP_TOKENS = _counter(
    "spec_decode_num_lookup_tokens", "Draft tokens verified that came from a target's prompt lookup."
)
ACCEPTED_LOOKUP_TOKENS = _counter(
    "spec_decode_num_accepted_lookup_tokens",
    "Of those, accepted. Never includes the corrected or bonus token.",
)
DRAFTING_GAIN = _gauge(
    "drafting_gain",
    "Tokens that steps with drafts committed, over what the same time brings without, at the present load; 0 "
    "while not known.",
)
DRAFTS_REST = _gauge("drafts_rest", "1 while drafts rest because that gain is too low, else 0.")
DRAFT_TURNS = _counter(
    "draft_turns", "Steps of a sequence whose draft had been asked for tokens, and had begun with it."
)
LATE_DRAFTS = _counter("late_drafts", "Of those, steps that began without a candidate.")
PREFIX_CACHE_QUERIES = _counter(
    "prefix_cache_queries", "Tokens of admitted sequences that a target looked for in its prefix cache."
)
PREFIX_CACHE_HITS = _counter("prefix_cache_hits", "Of those, found and not computed again.")
PREEMPTIONS = _counter(
    "num_preemptions", "Sequences that gave up their KV blocks to others and were computed again later."
)
REQUESTS_FINISHED = _counter("num_requests_finished", "Sequences that ended at a target, in whatever way.")
STALE_MESSAGES = _counter(
    "stale_messages", "Messages of drafts and gateways that a target dropped: events had overtaken them."
)
QUARANTINED_SEQUENCES = _counter(
    "quarantined_sequences", "Sequences that a target took from a draft which had sent impossible tokens."
)

# ---------------------------------------------------------------------- drafts

DRAFT_SEQUENCES = _gauge("draft_sequences", "Sequences that a draft holds.")
DRAFT_RESTING_SEQUENCES = _gauge(
    "draft_resting_sequences", "Of those, sequences for which its target wants no tokens at present."
)
DRAFT_KV_CACHE_USAGE = _gauge(
    "draft_kv_cache_usage_perc", "Share of a draft's KV blocks that its sequences hold, 0 to 1."
)
DRAFT_TARGETS = _gauge("draft_targets", "Targets that a draft is attached to.")
DRAFT_STEP_SECONDS = _gauge("draft_step_time_seconds", "Time of a draft's last step.")
DRAFT_BUSY_SECONDS = _counter("draft_busy_seconds", "Time that a draft spent in steps.")
DRAFTED_TOKENS = _counter("drafted_tokens", "Tokens that a draft proposed, verified or not.")
DISCARDED_TOKENS = _counter("discarded_tokens", "Tokens of its chains that a draft threw away by verdicts.")
BRANCH_TOKENS = _counter(
    "branch_tokens", "Tokens that a draft made for likely corrections, beside its chains."
)
CORRECTIONS = _counter(
    "corrections", "Verdicts that corrected a chain while a draft prepared for likely corrections."
)
PREPARED_CORRECTIONS = _counter(
    "prepared_corrections", "Of those, where a tail for the corrected token was ready, and sent at once."
)
DRAFT_PREFILL_TOKENS = _counter("draft_prefill_tokens", "Tokens that a draft computed to catch up.")
DRAFT_PREFIX_CACHE_QUERIES = _counter(
    "draft_prefix_cache_queries", "Tokens that a draft looked for in its prefix cache."
)
DRAFT_PREFIX_CACHE_HITS = _counter("draft_prefix_cache_hits", "Of those, found and not computed again.")
DRAFT_DECLINES = _counter("draft_declines", "Sequences that a draft gave back.")

# ---------------------------------------------------------------------- gateways

GATEWAY_REQUESTS_RUNNING = _gauge("gateway_requests_running", "Sequences that a gateway works on.")
GATEWAY_REQUESTS_QUEUED = _gauge(
    "gateway_requests_queued", "Sequences that wait for a gateway's max_ongoing_requests."
)
GATEWAY_SEQUENCES_UNPLACED = _gauge(
    "gateway_sequences_unplaced", "Sequences that wait at a gateway for a target to take them."
)
GATEWAY_TARGETS = _gauge("gateway_targets", "Targets that a gateway may place sequences on.")
PLACEMENTS = _counter("placements", "Sequences that a gateway placed on a target, each time counted.")
FAILOVERS = _counter(
    "failovers",
    "Sequences that a gateway had to place again because their target was lost, failed them or left before "
    "their end, each time counted; not those that a leaving target gave back.",
)
IGNORED_MESSAGES = _counter(
    "gateway_ignored_messages", "Messages of a former placement, or of a sequence that had ended."
)
TIME_TO_FIRST_TOKEN = Metric(
    "time_to_first_token_seconds",
    Kind.HISTOGRAM,
    "From a request's arrival at the gateway to the first token of each of its choices.",
    buckets=LATENCY_BUCKETS,
)
TIME_PER_OUTPUT_TOKEN = Metric(
    "time_per_output_token_seconds",
    Kind.HISTOGRAM,
    "Mean time per token after the first one, of each choice that ended well.",
    buckets=TOKEN_BUCKETS,
)
REQUEST_LATENCY = Metric(
    "e2e_request_latency_seconds",
    Kind.HISTOGRAM,
    "From a request's arrival at the gateway to the end of each of its choices that ended well.",
    buckets=LATENCY_BUCKETS,
)

METRICS: tuple[Metric, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Metric))


# ---------------------------------------------------------------------- from what the parts tell


def target_samples(snapshot: TargetSnapshot) -> Iterator[Sample]:
    yield Sample(REQUESTS_RUNNING, snapshot.num_running)
    yield Sample(REQUESTS_WAITING, snapshot.num_waiting)
    yield Sample(QUEUE_SECONDS, snapshot.queue_seconds)
    yield Sample(KV_CACHE_USAGE, kv_cache_usage(snapshot.free_blocks, snapshot.total_blocks))
    yield Sample(DRAFTS_ATTACHED, len(snapshot.drafts))
    yield Sample(SEQUENCES_WANTING_DRAFT, snapshot.num_wanting_draft)
    yield Sample(SEQUENCES_DRAFTED, snapshot.num_drafted)
    yield Sample(STEP_SECONDS, snapshot.step_seconds)
    yield Sample(
        DRAFT_RESPONSE_SECONDS, max((draft.response_seconds for draft in snapshot.drafts), default=0.0)
    )
    yield Sample(PROMPT_TOKENS, snapshot.num_prompt_tokens_total)
    yield Sample(GENERATION_TOKENS, snapshot.num_committed_tokens_total)
    yield Sample(COMPUTED_TOKENS, snapshot.num_computed_tokens_total)
    yield Sample(ENGINE_STEPS, snapshot.num_steps_total)
    yield Sample(SPEC_DECODE_NUM_DRAFTS, snapshot.num_rounds_total)
    yield Sample(SPEC_DECODE_NUM_DRAFT_TOKENS, snapshot.num_draft_tokens_total)
    yield Sample(SPEC_DECODE_NUM_ACCEPTED_TOKENS, snapshot.num_accepted_tokens_total)
    for position, count in enumerate(snapshot.num_accepted_per_position_total):
        yield Sample(SPEC_DECODE_NUM_ACCEPTED_TOKENS_PER_POS, count, {"position": str(position)})
    yield Sample(LOOKUP_TOKENS, snapshot.num_lookup_tokens_total)
    yield Sample(ACCEPTED_LOOKUP_TOKENS, snapshot.num_accepted_lookup_tokens_total)
    yield Sample(DRAFTING_GAIN, snapshot.drafting_gain)
    yield Sample(DRAFTS_REST, float(snapshot.drafts_rest))
    yield Sample(DRAFT_TURNS, snapshot.num_draft_turns_total)
    yield Sample(LATE_DRAFTS, snapshot.num_late_drafts_total)
    yield Sample(PREFIX_CACHE_QUERIES, snapshot.num_prefix_cache_queries_total)
    yield Sample(PREFIX_CACHE_HITS, snapshot.num_prefix_cache_hits_total)
    yield Sample(PREEMPTIONS, snapshot.num_preemptions_total)
    yield Sample(REQUESTS_FINISHED, snapshot.num_finished_total)
    yield Sample(STALE_MESSAGES, snapshot.num_stale_messages_total)
    yield Sample(QUARANTINED_SEQUENCES, snapshot.num_quarantined_total)


def draft_samples(snapshot: DraftSnapshot) -> Iterator[Sample]:
    yield Sample(DRAFT_SEQUENCES, snapshot.num_sequences)
    yield Sample(DRAFT_RESTING_SEQUENCES, snapshot.num_resting_sequences)
    yield Sample(DRAFT_KV_CACHE_USAGE, kv_cache_usage(snapshot.num_free_blocks, snapshot.num_blocks))
    yield Sample(DRAFT_TARGETS, snapshot.num_targets)
    yield Sample(DRAFT_STEP_SECONDS, snapshot.step_seconds)
    yield Sample(DRAFT_BUSY_SECONDS, snapshot.busy_seconds_total)
    yield Sample(DRAFTED_TOKENS, snapshot.num_drafted_tokens_total)
    yield Sample(DISCARDED_TOKENS, snapshot.num_discarded_tokens_total)
    yield Sample(BRANCH_TOKENS, snapshot.num_branch_tokens_total)
    yield Sample(CORRECTIONS, snapshot.num_corrections_total)
    yield Sample(PREPARED_CORRECTIONS, snapshot.num_prepared_corrections_total)
    yield Sample(DRAFT_PREFILL_TOKENS, snapshot.num_prefill_tokens_total)
    yield Sample(DRAFT_PREFIX_CACHE_QUERIES, snapshot.num_prefix_cache_queries_total)
    yield Sample(DRAFT_PREFIX_CACHE_HITS, snapshot.num_prefix_cache_hits_total)
    yield Sample(DRAFT_DECLINES, snapshot.num_declines_total)


def gateway_samples(status: Mapping[str, Any]) -> Iterator[Sample]:
    """``status``: as ``GatewayDeployment.status`` gives it."""
    yield Sample(GATEWAY_REQUESTS_RUNNING, status["num_ongoing"])
    yield Sample(GATEWAY_REQUESTS_QUEUED, status["num_queued"])
    yield Sample(GATEWAY_SEQUENCES_UNPLACED, status["num_waiting"])
    yield Sample(GATEWAY_TARGETS, len(status["targets"]))
    yield Sample(PLACEMENTS, status["num_placements"])
    yield Sample(FAILOVERS, status["num_failovers"])
    yield Sample(IGNORED_MESSAGES, status["num_ignored_messages"])
