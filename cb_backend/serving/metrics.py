"""What the server exports about this model: names, meanings, and which figures they are made of.

Our own names begin with `cb_`. The gauges that TensorRT-LLM's backend made known are always there, because gateways
route by them; vLLM's names only where config.pbtxt says `REPORT_CUSTOM_METRICS`, as with vLLM's backend. What belongs
to the whole engine is published by one front end only. How a metric reaches the server is the exporter's business.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from cb_backend.contracts.messages import EngineStats, ModelInfo
from cb_backend.kv_cache.block_needs import BlockNeeds
from cb_backend.kv_cache.layout import ALL_TOKENS
from cb_backend.serving import latency
from cb_backend.serving.adapter_metrics import publish_adapter_counts, publish_adapter_state
from cb_backend.serving.latency import Totals
from cb_backend.serving.metric_exporter import MAX_OBSERVATIONS, HistogramFeed, MetricExporter
from cb_backend.serving.rest_metrics import publish_rest_counts, publish_rest_state

OUTCOMES = ("stop", "length", "cancelled", "invalid_arg", "unavailable", "internal", "unsupported")


class _Histogram(NamedTuple):
    name: str
    source: str  # name in `latency.BOUNDS`, or field of `StepStats`
    description: str
    bounds: tuple[float, ...] | None = None  # None: the source's


# Of the whole engine: name -> (field of EngineStats, description).
_ENGINE_COUNTERS = {
    "cb_prompt_tokens_total": ("num_prompt_tokens", "Prompt tokens of admitted requests"),
    "cb_prefix_cache_reset_blocks_total": ("num_reset_blocks", "Cached blocks forgotten by resets of the prefix cache"),
    "cb_cached_prompt_tokens_total": ("num_cached_prompt_tokens", "Prompt tokens found in the prefix cache"),
    "cb_output_tokens_total": ("num_output_tokens", "Tokens generated"),
    "cb_preemptions_total": ("num_preemptions", "Requests put back into the queue for lack of KV blocks"),
    "cb_engine_cancellations_total": ("num_cancelled", "Requests ended at the engine before their end"),
    "cb_refused_requests_total": ("num_refused", "Requests refused for a full queue"),
    "cb_timed_out_requests_total": ("num_timed_out", "Requests ended by timeout_ms or queue_timeout_ms"),
    "cb_swapped_out_requests_total": ("num_swapped_out", "Preempted requests whose KV blocks went to host memory"),
    "cb_swapped_in_requests_total": ("num_swapped_in", "Requests whose KV blocks came back from host memory"),
    "cb_compiled_grammars_total": ("num_compiled_grammars", "Grammars of structured output that were compiled"),
    "cb_refused_grammars_total": ("num_refused_grammars", "Grammars that could not be compiled"),
    "cb_grammar_seconds_total": ("grammar_seconds", "Compiling grammars, beside the engine's loop"),
    "cb_evicted_blocks_total": ("num_evicted_blocks", "Cached KV blocks given up for new ones"),
}
_VLLM_ENGINE_COUNTERS = {
    "vllm:prompt_tokens_total": ("num_prompt_tokens", "Number of prefill tokens processed"),
    "vllm:generation_tokens_total": ("num_output_tokens", "Number of generation tokens processed"),
}
# Of its steps: name -> (field of StepStats, description).
_STEP_COUNTERS = {
    "cb_steps_total": ("num_steps", "Steps of the engine"),
    "cb_scheduled_tokens_total": ("num_scheduled_tokens", "Tokens computed in steps, prompts and outputs"),
    "cb_step_host_seconds_total": ("host_seconds", "Scheduling, taking results in and sending them; per step: / steps"),
    "cb_step_launch_seconds_total": ("launch_seconds", "Launching steps (on a CPU: computing them)"),
    "cb_step_wait_seconds_total": ("wait_seconds", "Waiting for results"),
}
_STEP_HISTOGRAMS = (
    _Histogram("cb_step_seconds", "step_seconds", "Time of a step, from the end of the one before if that was later"),
    _Histogram("cb_step_requests", "step_requests", "Requests in a step: the batch size"),
    _Histogram("cb_step_tokens", "step_tokens", "Tokens computed in a step"),
)
# Of this front end's requests; those without an error.
_REQUEST_HISTOGRAMS = (
    _Histogram("cb_time_to_first_token_seconds", "time_to_first_token", "From arrival to the first response"),
    _Histogram("cb_request_queue_time_seconds", "queue_time", "From arrival to the first step"),
    _Histogram("cb_request_prefill_time_seconds", "prefill_time", "From the first step to the first token"),
    _Histogram("cb_request_decode_time_seconds", "decode_time", "From the first token to the last"),
    _Histogram("cb_e2e_request_latency_seconds", "e2e_latency", "From arrival to the final response sent"),
    _Histogram("cb_request_prompt_tokens", "prompt_tokens", "Prompt tokens of a request"),
    _Histogram("cb_request_output_tokens", "output_tokens", "Output tokens of a request, all answers together"),
    _Histogram("cb_inter_token_latency_seconds", "inter_token", "From one token of an answer to its next, per token"),
)
# vLLM's, with its buckets; the sources' bounds contain them.
_VLLM_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_VLLM_PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_VLLM_E2E = (1.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0)
_VLLM_HISTOGRAMS = (
    _Histogram(
        "vllm:time_to_first_token_seconds",
        "time_to_first_token",
        "Histogram of time to first token in seconds",
        _VLLM_FIRST_TOKEN,
    ),
    _Histogram(
        "vllm:time_per_output_token_seconds",
        "inter_token",
        "Histogram of time per output token in seconds",
        _VLLM_PER_TOKEN,
    ),
    _Histogram(
        "vllm:e2e_request_latency_seconds",
        "e2e_latency",
        "Histogram of end to end request latency in seconds",
        _VLLM_E2E,
    ),
    _Histogram("vllm:request_prompt_tokens", "prompt_tokens", "Number of prefill tokens processed"),
    _Histogram("vllm:request_generation_tokens", "output_tokens", "Number of generation tokens processed"),
    _Histogram("vllm:request_params_n", "num_answers", "Histogram of the n request parameter"),
)


class EngineReport(NamedTuple):
    """What is known of one engine. An engine that is down has no requests and holds no blocks."""

    stats: EngineStats
    info: ModelInfo
    is_up: bool = True


def _tokens_in(num_blocks: int, info: ModelInfo) -> int:
    """Blocks times their tokens, where all layers keep the same. Else a token takes a block of each group of layers,
    but for those whose windows it has fallen out of: the longer requests are, the more of them are held.
    """
    if info.kv_windows == (ALL_TOKENS,):
        return num_blocks * info.block_size
    needs = BlockNeeds(info.kv_windows, info.block_size, most_in_flight=1)
    length = min(info.max_model_len, needs.most_tokens(num_blocks))
    return num_blocks * length // max(needs.num_blocks_for(length), 1)


class Metrics:
    """Publishes totals since the start, of this front end and (where it is the one) of the engine."""

    def __init__(self, exporter: MetricExporter, has_vllm_names: bool = False, max_model_len: int = 1_000_000) -> None:
        """`max_model_len` ends the buckets of token counts."""
        self._exporter = exporter
        self._max_model_len = max_model_len
        self._has_vllm_names = has_vllm_names
        self._feeds: dict[tuple[str, int], HistogramFeed] = {}  # by histogram and engine
        self._last_stats: dict[int, EngineStats] = {}  # by engine
        self._last_counts: Counter[str] = Counter()

    def close(self) -> None:
        self._exporter.close()

    def publish(self, counts: Counter[str], totals: dict[str, Totals]) -> None:
        """This front end's own figures, as `Responder.counts` and `Latencies.totals` give them. First of a round."""
        self._exporter.begin_round()
        exporter, last = self._exporter, self._last_counts
        for outcome in OUTCOMES:
            grown = counts[outcome] - last[outcome]
            exporter.count("cb_requests_total", "Requests by outcome", grown, outcome=outcome)
        for name, key, description in (
            ("cb_responses_total", "responses", "Responses sent"),
            ("cb_coalesced_responses_total", "coalesced", "Streamed responses that carried several tokens"),
            ("cb_slow_readers_total", "slow_readers", "Requests ended because their client did not read"),
        ):
            exporter.count(name, description, counts[key] - last[key])
        self._last_counts = counts
        histograms = _REQUEST_HISTOGRAMS + (_VLLM_HISTOGRAMS if self._has_vllm_names else ())
        self._publish_histograms(
            (histogram, latency.BOUNDS[histogram.source], totals[histogram.source]) for histogram in histograms
        )

    def publish_engines(self, reports: Mapping[int, EngineReport]) -> None:
        """State and counts of all engines together, by the engine's index: sums, of several as of one."""
        running, waiting, swapped, num_used, num_blocks, num_tokens, num_seqs = 0, 0, 0, 0, 0, 0, 0
        for stats, info, is_up in reports.values():
            running += stats.num_running * is_up
            waiting += stats.num_waiting * is_up
            swapped += stats.num_swapped * is_up
            num_used += (stats.num_blocks - stats.num_free_blocks) * is_up
            num_blocks += stats.num_blocks
            num_tokens += _tokens_in(stats.num_blocks, info)
            num_seqs += info.max_num_seqs
        block_size = next(report.info.block_size for report in reports.values())
        self._publish_state(running, waiting, num_used, num_blocks, num_seqs, block_size)
        tokens_text = "Tokens that the KV cache holds, of requests as long as the model takes or the cache holds one"
        self._exporter.set("cb_kv_cache_tokens", tokens_text, num_tokens)
        num_up = sum(report.is_up for report in reports.values())
        swap_text = "Of the waiting, preempted requests whose KV blocks are in host memory"
        self._exporter.set("cb_requests_swapped", swap_text, swapped)
        self._exporter.set("cb_engine_up", "Engines that can take requests", num_up)
        adapters = [stats.adapters for stats, _, is_up in reports.values() if is_up and stats.adapters is not None]
        publish_adapter_state(self._exporter, adapters)
        rests = [stats.rest for stats, _, is_up in reports.values() if is_up and stats.rest is not None]
        publish_rest_state(self._exporter, rests)
        for index, report in reports.items():
            self._publish_counts(index, report.stats)

    def _publish_counts(self, index: int, stats: EngineStats) -> None:
        last = self._last_stats.get(index)
        before = last if last is not None and last.engine_pid == stats.engine_pid else None
        self._exporter.count_since(self._engine_counters(), stats, before)
        restarts = int(last is not None and before is None)
        self._exporter.count("cb_engine_restarts_total", "Engine processes after the first", restarts)
        if stats.adapters is not None:
            publish_adapter_counts(self._exporter, stats.adapters, before.adapters if before is not None else None)
        if stats.rest is not None:
            publish_rest_counts(self._exporter, stats.rest, before.rest if before is not None else None)
        if stats.steps is not None:
            self._publish_steps(index, stats, before)
        self._last_stats[index] = stats

    def skip_engine(self, index: int, stats: EngineStats) -> None:
        """Another front end publishes these; if it goes, this one counts on from here (half a second's work may be
        counted twice or not at all)."""
        self._last_stats[index] = stats
        if stats.steps is not None:
            for histogram in _STEP_HISTOGRAMS:
                buckets = getattr(stats.steps, histogram.source)
                self._feed(histogram.name, buckets.bounds, index).skip(buckets.counts, buckets.sums)

    def _engine_counters(self) -> dict[str, tuple[str, str]]:
        return {**_ENGINE_COUNTERS, **(_VLLM_ENGINE_COUNTERS if self._has_vllm_names else {})}

    def _publish_state(
        self, running: int, waiting: int, num_used: int, num_blocks: int, num_seqs: int, block_size: int
    ) -> None:
        put, fraction = self._exporter.set, num_used / max(num_blocks, 1)
        requests = {"active": running + waiting, "scheduled": running, "waiting": waiting, "max": num_seqs}
        for kind, value in requests.items():
            put("nv_trt_llm_request_metrics", "Requests in the engine", value, request_type=kind)
        blocks = {
            "max": num_blocks,
            "free": num_blocks - num_used,
            "used": num_used,
            "tokens_per": block_size,
            "fraction": fraction,
        }
        for kind, amount in blocks.items():
            put("nv_trt_llm_kv_cache_block_metrics", "KV cache blocks", amount, kv_cache_block_type=kind)
        put("cb_requests_running", "Requests in the batch", running)
        put("cb_requests_waiting", "Requests in the engine's queue", waiting)
        put("cb_kv_cache_usage", "Share of the KV blocks that requests hold, 0 to 1", fraction)
        if self._has_vllm_names:
            put("vllm:num_requests_running", "Number of requests in the batch", running)
            put("vllm:num_requests_waiting", "Number of requests waiting", waiting)
            put("vllm:kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage", fraction)
            sizes = {"block_size": str(block_size), "num_gpu_blocks": str(num_blocks)}
            put("vllm:cache_config_info", "Information of the cache config", 1, **sizes)

    def _publish_steps(self, index: int, stats: EngineStats, before: EngineStats | None) -> None:
        steps, last = stats.steps, before.steps if before is not None else None
        assert steps is not None
        self._exporter.count_since(_STEP_COUNTERS, steps, last)
        if before is None:
            for histogram in _STEP_HISTOGRAMS:
                self._feeds.pop((histogram.name, index), None)
        sources = ((histogram, getattr(steps, histogram.source)) for histogram in _STEP_HISTOGRAMS)
        todo = ((histogram, b.bounds, (list(b.counts), list(b.sums))) for histogram, b in sources)
        self._publish_histograms(todo, index)

    def _publish_histograms(self, todo: Iterator[tuple[_Histogram, tuple[float, ...], Totals]], index: int = 0) -> None:
        """The fewest values first, so that what they leave of the round's budget serves the many."""
        budget = MAX_OBSERVATIONS
        entries = [(self._feed(histogram.name, b, index), histogram, b, totals) for histogram, b, totals in todo]
        entries.sort(key=lambda entry: entry[0].num_pending(entry[3][0]))
        for i, (feed, histogram, bounds, (counts, sums)) in enumerate(entries):
            values, num_untold = feed.take(counts, sums, max(budget // (len(entries) - i), 1))
            budget -= sum(count for _, count in values)
            bounds = histogram.bounds or bounds
            if histogram.source in ("prompt_tokens", "output_tokens"):
                bounds = tuple(bound for bound in bounds if bound <= self._max_model_len)
            self._exporter.observe(histogram.name, histogram.description, bounds, values)
            if num_untold:
                description = "Values that a histogram was not told of, because there were too many: it is a sample"
                self._exporter.count("cb_unobserved_values_total", description, num_untold, histogram=histogram.name)

    def _feed(self, name: str, bounds: tuple[float, ...], index: int) -> HistogramFeed:
        if (name, index) not in self._feeds:
            self._feeds[name, index] = HistogramFeed(bounds)
        return self._feeds[name, index]
