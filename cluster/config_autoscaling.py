"""How pools grow and shrink: the configuration's sections on autoscaling."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from paceline.cluster.config_errors import ConflictError
from paceline.cluster.config_section import Count, Delay, Factor, Seconds, Section

Share = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
Load = Annotated[float, Field(gt=0, allow_inf_nan=False)]
OptionalLoad = Annotated[float | None, Field(gt=0, allow_inf_nan=False)]


class AutoscalingConfig(Section):
    """What every pool that follows the load has (Ray Serve's option of the same name)."""

    min_replicas: Annotated[int, Field(ge=0)] = 1
    """Fewest replicas; 0 lets the pool go to sleep."""
    max_replicas: Count = 1
    """Most replicas."""
    initial_replicas: Annotated[int | None, Field(ge=0)] = None
    """Replicas at the start; null = `min_replicas`."""
    metrics_interval_s: Seconds = 2.0
    """How often a replica reports its load."""
    look_back_period_s: Seconds = 10.0
    """Over how long the load is averaged."""
    upscale_delay_s: Delay = 5.0
    """How long more replicas must have been wanted before they are started."""
    downscale_delay_s: Delay = 120.0
    """How long fewer replicas must have been wanted before some are stopped."""
    downscale_to_zero_delay_s: Annotated[float | None, Field(ge=0, allow_inf_nan=False)] = None
    """The same for the last replica; null = `downscale_delay_s`."""
    upscaling_factor: Factor = None
    """Damps (below 1) or sharpens (above 1) growth; null = 1."""
    downscaling_factor: Factor = None
    """Damps (below 1) or sharpens (above 1) shrinking; null = 1."""

    @model_validator(mode="after")
    def _bounds_agree(self) -> AutoscalingConfig:
        if self.min_replicas > self.max_replicas:
            raise ConflictError(
                "min_replicas",
                f"is {self.min_replicas}, above max_replicas = {self.max_replicas} — lower it, or raise "
                "max_replicas",
            )
        initial = self.initial_replicas
        if initial is not None and not self.min_replicas <= initial <= self.max_replicas:
            raise ConflictError(
                "initial_replicas",
                f"is {initial} — choose a number in [min_replicas, max_replicas] = "
                f"[{self.min_replicas}, {self.max_replicas}]",
            )
        return self

    @model_validator(mode="after")
    def _reports_are_averaged(self) -> AutoscalingConfig:
        if self.look_back_period_s <= self.metrics_interval_s:
            raise ConflictError(
                "look_back_period_s",
                f"is {self.look_back_period_s:g}, and reports come every metrics_interval_s = "
                f"{self.metrics_interval_s:g} s — raise it above that, or report more often",
            )
        return self


class GatewayAutoscalingConfig(AutoscalingConfig):
    """How the gateways grow and shrink: with the requests that they work on (Ray Serve's own policy)."""

    min_replicas: Count = 1
    """Fewest replicas. At least 1: without a gateway nobody hears a request."""
    target_ongoing_requests: Load = 16.0
    """Requests per replica that the pool aims at, streams included."""


class TargetAutoscalingConfig(AutoscalingConfig):
    """How the target pool grows and shrinks: the largest of what sequences, KV cache and queue call for. With
    `min_replicas: 0` it goes to sleep when nothing runs, and the next request wakes it."""

    target_ongoing_requests: Load = 16.0
    """Sequences per replica that the pool aims at, those that run and those that wait."""
    target_kv_cache_usage: Share = 0.8
    """Share of the KV cache that live sequences may fill, averaged over the pool."""
    max_queue_time_s: Seconds = 5.0
    """While a sequence waits longer for its place on a target, one more replica than run is wanted."""


class DraftAutoscalingConfig(AutoscalingConfig):
    """How the draft pool grows and shrinks: with the sequences for which the targets find that a draft pays,
    and with drafts that are busy and yet late. Where targets are so loaded that nothing is worth drafting, or
    idle, none are wanted; with `min_replicas: 0` all go, and the service goes on undrafted."""

    min_replicas: Annotated[int, Field(ge=0)] = 0
    """Fewest replicas; 0 lets all go while there is nothing to draft."""
    target_ongoing_requests: OptionalLoad = None
    """Sequences per replica that the pool aims at; null = the draft's `max_num_seqs`."""
    max_lateness: Share = 0.25
    """Share of a drafted sequence's steps that may begin without a candidate. While more do, and the drafts
    are busy, one more replica than run is wanted, up to one per sequence."""
