"""Makes Prometheus metrics of the engine's counters and the latencies of requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mlxpaged.api.recent_latencies import RecentLatencies
from mlxpaged.core.engine.request import Request, RequestOutput
from mlxpaged.core.engine.status import EngineStats
from mlxpaged.core.scheduling.sequence import FinishReason
from mlxpaged.parts.disk.disk_tier import NO_TIER
from mlxpaged.parts.drafting.draft_stats import DRAFTERS, NO_DRAFTS
from mlxpaged.parts.embeddings.embedder import NO_EMBEDDINGS
from mlxpaged.parts.images.image_encoder import NO_IMAGES
from mlxpaged.parts.repetition.loop_end import NO_LOOPS
from mlxpaged.registry.model import Model, ModelState

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320)
INTER_TOKEN_BUCKETS = (0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.12, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4)


Read = Callable[[EngineStats], float]

USAGES: tuple[tuple[str, str, Callable[[EngineStats], Any], tuple[str, ...]], ...] = (
    ("kv_blocks", "KV blocks by state", lambda stats: stats.scheduler.blocks, ("used", "cached", "free")),
    ("swap_blocks", "Swap space blocks by state", lambda stats: stats.scheduler.swap, ("used", "free")),
)
GAUGES: tuple[tuple[str, str, Read], ...] = (
    ("requests_running", "Sequences in the running batch", lambda stats: stats.scheduler.running),
    ("requests_waiting", "Waiting sequences", lambda stats: stats.scheduler.waiting),
    ("max_kv_blocks", "Most KV blocks that the pool can have", lambda stats: stats.scheduler.max_blocks),
    ("kv_cache_bytes", "Bytes of the KV pools", lambda stats: stats.kv_cache_bytes),
    ("max_kv_cache_bytes", "Most bytes of the KV pools", lambda stats: stats.max_kv_cache_bytes),
    (
        "state_checkpoints",
        "Checkpoints of recurrent states in the prefix cache",
        lambda stats: stats.scheduler.checkpoints,
    ),
    ("max_state_checkpoints", "Most checkpoints of recurrent states", lambda stats: stats.scheduler.max_checkpoints),
    ("state_reserved_bytes", "Bytes reserved for recurrent states", lambda stats: stats.state_bytes),
    (
        "embedding_inputs_waiting",
        "Inputs that wait for their embeddings",
        lambda stats: stats.of(NO_EMBEDDINGS).waiting,
    ),
    ("prefix_disk_bytes", "Bytes of prefixes on the disk", lambda stats: stats.of(NO_TIER).store.size),
    (
        "prefix_disk_written_today_bytes",
        "Bytes of prefixes that were written today",
        lambda stats: stats.of(NO_TIER).store.written_today,
    ),
    (
        "swap_file_written_today_bytes",
        "Bytes that went into the swap file today",
        lambda stats: stats.swap_written_today,
    ),
    (
        "prefix_disk_writing_stopped",
        "1 if an error of the disk has stopped the writing of prefixes",
        lambda stats: bool(stats.of(NO_TIER).store.stopped),
    ),
    ("requests_loading", "Requests whose prefix is read from the disk", lambda stats: stats.of(NO_TIER).loading),
    ("image_feature_bytes", "Bytes of the features of images", lambda stats: stats.of(NO_IMAGES).feature_bytes),
)
COUNTERS: tuple[tuple[str, str, Read], ...] = (
    ("embedding_requests", "Requests whose embeddings were made", lambda stats: stats.of(NO_EMBEDDINGS).requests_total),
    ("embedding_tokens", "Tokens of inputs that were embedded", lambda stats: stats.of(NO_EMBEDDINGS).tokens_total),
    ("embedding_steps", "Forward passes for embeddings", lambda stats: stats.of(NO_EMBEDDINGS).steps_total),
    ("images_encoded", "Images that were encoded", lambda stats: stats.of(NO_IMAGES).encoded_total),
    (
        "prefix_hit_tokens",
        "Prompt tokens taken from the prefix cache",
        lambda stats: stats.scheduler.prefix_hit_tokens_total,
    ),
    ("prompt_tokens", "Prompt tokens of admitted requests", lambda stats: stats.scheduler.prompt_tokens_total),
    (
        "prefilled_tokens",
        "Tokens computed that were not sampled from",
        lambda stats: stats.prefilled_tokens_total,
    ),
    ("generated_tokens", "Tokens generated", lambda stats: stats.generated_tokens_total),
    ("loops_ended", "Answers ended because they repeated themselves", lambda stats: stats.of(NO_LOOPS).ended_total),
    ("loop_tokens", "Tokens of the repetitions by which answers ended", lambda stats: stats.of(NO_LOOPS).tokens_total),
    ("preemptions", "Sequences preempted", lambda stats: stats.scheduler.preemptions_total),
    (
        "starvation_admissions",
        "Admissions at the starvation bound",
        lambda stats: stats.scheduler.starvation_admissions_total,
    ),
    ("kv_blocks_copied", "KV blocks copied before a write", lambda stats: stats.scheduler.blocks_copied_total),
    (
        "kv_blocks_swapped_out",
        "KV blocks moved to swap space",
        lambda stats: stats.scheduler.blocks_swapped_out_total,
    ),
    (
        "kv_blocks_swapped_in",
        "KV blocks moved back from swap space",
        lambda stats: stats.scheduler.blocks_swapped_in_total,
    ),
    ("kv_blocks_stored", "KV blocks given to the disk", lambda stats: stats.of(NO_TIER).blocks_stored_total),
    ("kv_blocks_loaded", "KV blocks read from the disk", lambda stats: stats.of(NO_TIER).blocks_loaded_total),
    (
        "prefix_disk_written_bytes",
        "Bytes of prefixes that were written since the start",
        lambda stats: stats.of(NO_TIER).store.written_total,
    ),
    (
        "swap_file_written_bytes",
        "Bytes that went into the swap file since the model was loaded",
        lambda stats: stats.swap_written_total,
    ),
    ("engine_steps", "Steps of the engine", lambda stats: stats.steps_total),
    ("model_calls", "Forward passes of the model", lambda stats: stats.model_calls_total),
    (
        "attention_calls",
        "Attention calls, one per layer and forward pass",
        lambda stats: stats.attention_calls_total,
    ),
)
"""Name, text and value of each metric. A counter's name gets _total."""


def stats_of(model: Model) -> EngineStats | None:
    """The latest statistics of a model that is loaded, or was until its engine failed."""
    return None if model.engine is None else model.engine.stats


class Metrics(Collector):
    """One registry per server. `observe` is called for every output of every request, on the event loop.

    models: the served models, loaded or not.
    """

    def __init__(self, models: Callable[[], Iterable[Model]]) -> None:
        self._models = models
        self.registry = CollectorRegistry()
        self.registry.register(self)
        histogram = partial(
            Histogram, namespace="mlxpaged", unit="seconds", labelnames=["model"], registry=self.registry
        )
        self._first_token = histogram("time_to_first_token", "Time to first token (TTFT)", buckets=LATENCY_BUCKETS)
        self._inter_token = histogram("inter_token_latency", "Time between tokens (ITL)", buckets=INTER_TOKEN_BUCKETS)
        self._end_to_end = histogram("e2e_request_latency", "Time of a whole request", buckets=LATENCY_BUCKETS)
        finished = "mlxpaged_requests_finished"
        self._finished = Counter(finished, "Requests by finish reason", ["model", "reason"], registry=self.registry)
        refused = "mlxpaged_requests_refused"
        self._refused = Counter(refused, "Requests that were refused, by error code", ["code"], registry=self.registry)
        self._last_token_at: dict[str, float] = {}
        self.recent = RecentLatencies()

    def collect(self) -> Iterator[Metric]:
        """Reads the engines' latest snapshots at each scrape, so that the step loop does no work for metrics."""
        yield from self._model_metrics()
        models = {model.name: stats for model in self._models() if (stats := stats_of(model)) is not None}
        for name, text, read_usage, states in USAGES:
            gauge = GaugeMetricFamily(f"mlxpaged_{name}", text, labels=["model", "state"])
            for model, stats in models.items():
                for state in states:
                    gauge.add_metric([model, state], getattr(read_usage(stats), state))
            yield gauge
        for which, field in (("", "drafted"), ("_accepted", "accepted")):
            text = f"Draft tokens that were {'sampled' if which else 'verified'}, by what drafted them"
            counter = CounterMetricFamily(f"mlxpaged_draft_tokens{which}", text, labels=["model", "drafter"])
            for model, stats in models.items():
                for drafter, counts in zip(DRAFTERS, stats.of(NO_DRAFTS).counts, strict=True):
                    counter.add_metric([model, drafter], getattr(counts, field))
            yield counter
        for family, values in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS)):
            for name, text, read in values:
                metric = family(f"mlxpaged_{name}", text, labels=["model"])
                for model, stats in models.items():
                    metric.add_metric([model], read(stats))
                yield metric

    def _model_metrics(self) -> Iterator[Metric]:
        state = GaugeMetricFamily("mlxpaged_model_state", "1 for the state of a model", labels=["model", "state"])
        memory = GaugeMetricFamily("mlxpaged_model_memory_bytes", "Bytes of a loaded model", labels=["model"])
        for model in self._models():
            for each in ModelState:
                state.add_metric([model.name, each.value], model.state is each)
            if (memory_bytes := model.memory_bytes) is not None:
                memory.add_metric([model.name], memory_bytes)
        yield state
        yield memory

    def observe(self, model: str, request: Request, output: RequestOutput) -> None:
        """model: its name."""
        if output.token_ids:
            previous = self._last_token_at.get(request.request_id)
            if previous is None:
                self._first_token.labels(model).observe(output.time - request.arrival_time)
                self.recent.first_token.append((output.time, output.time - request.arrival_time))
            else:
                self._inter_token.labels(model).observe(output.time - previous)
                self.recent.inter_token.append((output.time, output.time - previous))
            self._last_token_at[request.request_id] = output.time
        if output.finish_reason is not None:
            self._last_token_at.pop(request.request_id, None)
            self._end_to_end.labels(model).observe(output.time - request.arrival_time)
            self._finished.labels(model, output.finish_reason.value).inc()

    def count_refusal(self, code: str) -> None:
        """code: one of a bounded number, because each one is a time series."""
        self._refused.labels(code).inc()

    def render(self) -> bytes:
        for model in self._models():  # so that counters of 0 are shown, too
            if model.is_loaded:
                for histogram in (self._first_token, self._inter_token, self._end_to_end):
                    histogram.labels(model.name)
                for reason in FinishReason:
                    self._finished.labels(model.name, reason.value)
        return generate_latest(self.registry)
