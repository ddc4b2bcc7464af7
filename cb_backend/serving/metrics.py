"""The metrics that the server exports for this model, under the names that TensorRT-LLM's backend made known.

Each call on a metric is a blocking message to the server, so a housekeeping thread makes them, at most twice a
second, from counts that others keep. What belongs to the whole engine is published by one front end only.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import triton_python_backend_utils as pb_utils

from cb_backend.messages import EngineStats, ModelInfo

OUTCOMES = ("stop", "length", "cancelled", "invalid_arg", "unavailable", "internal", "unsupported")

# cb_ counters of the whole engine: name -> (field of EngineStats, description)
_ENGINE_COUNTERS = {
    "cb_prompt_tokens_total": ("num_prompt_tokens", "Prompt tokens of admitted requests"),
    "cb_cached_prompt_tokens_total": ("num_cached_prompt_tokens", "Prompt tokens found in the prefix cache"),
    "cb_output_tokens_total": ("num_output_tokens", "Tokens generated"),
    "cb_preemptions_total": ("num_preemptions", "Requests put back into the queue for lack of KV blocks"),
    "cb_engine_cancellations_total": ("num_cancelled", "Requests ended at the engine before their end"),
    "cb_evicted_blocks_total": ("num_evicted_blocks", "Cached KV blocks given up for new ones"),
}

logger = logging.getLogger("cb_backend.serving")


class Metrics:
    """Does nothing where the server was started without metrics.

    NOTE: making a metric family there is an error, and reading an error of this kind can crash the process (see
    `drain`), so the caller must know beforehand: `is_on`.
    """

    def __init__(self, model_name: str, model_version: str, is_on: bool = True) -> None:
        self._labels = {"model": model_name, "version": model_version}
        self._families: dict[str, Any] = {}  # a family must outlive its metrics
        self._metrics: dict[tuple[str, str], Any] = {}
        self._last_value: dict[tuple[str, str], float] = {}
        self._last_stats: EngineStats | None = None
        self._last_counts: Counter[str] = Counter()
        self._is_on = is_on

    def publish(self, counts: Counter[str]) -> None:
        """This front end's own counts, as `Responder.counts` gives them."""
        for outcome in OUTCOMES:
            self._count("cb_requests_total", "Requests by outcome", "outcome", outcome, self._grown(counts, outcome))
        grown = self._grown(counts, "responses")
        self._count("cb_responses_total", "Responses sent, several tokens each when behind", "", "", grown)
        self._last_counts = counts

    def publish_engine(self, stats: EngineStats, info: ModelInfo) -> None:
        """The whole engine's state and counts."""
        family, label = "nv_trt_llm_request_metrics", "request_type"
        requests = {
            "active": stats.num_running + stats.num_waiting,
            "scheduled": stats.num_running,
            "waiting": stats.num_waiting,
            "max": info.max_num_seqs,
        }
        for kind, value in requests.items():
            self._set(family, "Requests in the engine", label, kind, value)
        family, label = "nv_trt_llm_kv_cache_block_metrics", "kv_cache_block_type"
        num_used = stats.num_blocks - stats.num_free_blocks
        blocks = {
            "max": stats.num_blocks,
            "free": stats.num_free_blocks,
            "used": num_used,
            "tokens_per": info.block_size,
            "fraction": num_used / max(stats.num_blocks, 1),
        }
        for kind, amount in blocks.items():
            self._set(family, "KV cache blocks", label, kind, amount)
        before = self._last_stats
        for name, (field, description) in _ENGINE_COUNTERS.items():
            value, base = getattr(stats, field), getattr(before, field) if before is not None else 0
            self._count(name, description, "", "", value - base if value >= base else value)  # less: a new engine
        self._last_stats = stats

    def skip_engine(self, stats: EngineStats) -> None:
        """Another front end publishes these; if it goes, this one counts on from here."""
        self._last_stats = stats

    def close(self) -> None:
        """Give the metrics back to the server; the caller must be the last to speak to it."""
        self._is_on = False
        self._metrics.clear()
        self._families.clear()

    def _grown(self, counts: Counter[str], name: str) -> int:
        return counts[name] - self._last_counts[name]

    def _count(self, name: str, description: str, label: str, value: str, increment: float) -> None:
        metric = self._metric(name, description, pb_utils.MetricFamily.COUNTER, label, value)
        if metric is not None and increment > 0:
            metric.increment(increment)

    def _set(self, name: str, description: str, label: str, value: str, amount: float) -> None:
        metric = self._metric(name, description, pb_utils.MetricFamily.GAUGE, label, value)
        if metric is not None and self._last_value.get((name, value)) != amount:
            metric.set(amount)
            self._last_value[name, value] = amount

    def _metric(self, name: str, description: str, kind: Any, label: str, value: str) -> Any | None:
        """The metric, made at its first use; None once the server has said that it has no metrics."""
        if not self._is_on:
            return None
        try:
            if (name, value) not in self._metrics:
                if name not in self._families:
                    self._families[name] = pb_utils.MetricFamily(name=name, description=description, kind=kind)
                labels = {**self._labels, label: value} if label else self._labels
                self._metrics[name, value] = self._families[name].Metric(labels=labels)
            return self._metrics[name, value]
        except pb_utils.TritonModelException as error:
            logger.warning("the server exports no metrics of this model: %s", error)
            self._is_on = False
            return None
