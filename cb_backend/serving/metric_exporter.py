"""Counters, gauges and histograms in the server's registry, made at their first use.

The registry is the server's: metrics of the same name and labels are one and the same in all its processes. So
counters and histograms of several front ends add up, and of gauges the last `set` counts. (Found on server 2.51: a
histogram's buckets are those of whoever made it first; a metric stays until the last of its owners has gone.)

Every call is a blocking message to the server, 14 to 80 microseconds. Only the housekeeping thread makes them, and
`MAX_OBSERVATIONS` bounds what a round costs; a histogram can be told values only one by one. What a metric means is
not known here.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import triton_python_backend_utils as pb_utils

MAX_OBSERVATIONS = 1000  # in one round, two of which come in a second

logger = logging.getLogger("cb_backend.serving")


class HistogramFeed:
    """What of one histogram's totals has been told to the server already."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds` of the totals, which may be finer than those of the histogram."""
        self._edges = [0.0, *bounds, float("inf")]
        self._told_counts = [0] * (len(bounds) + 1)
        self._told_sums = [0.0] * (len(bounds) + 1)

    def skip(self, counts: Sequence[int], sums: Sequence[float]) -> None:
        """Somebody else tells these."""
        self._told_counts, self._told_sums = list(counts), list(sums)

    def num_pending(self, counts: Sequence[int]) -> int:
        return sum(counts) - sum(self._told_counts)

    def take(self, counts: Sequence[int], sums: Sequence[float], limit: int) -> tuple[list[tuple[float, int]], int]:
        """(value, how often) to be told now, and how many values go untold.

        Up to `limit` values the counts are exact, and so is their sum: each value is the mean of what its bucket has
        got. Beyond it every k-th is told, bucket by bucket, so that the distribution stays right; the rest of a
        division by k waits for the next round.
        """
        k = max(1, -(-self.num_pending(counts) // limit))
        values, num_untold = [], 0
        for i, count in enumerate(counts):
            num_told = (count - self._told_counts[i]) // k
            if num_told <= 0:
                continue
            mean = (sums[i] - self._told_sums[i]) / (count - self._told_counts[i])
            # A sum read a moment after its count may hold one value more: it must not move to another bucket.
            mean = min(max(mean, self._edges[i]), self._edges[i + 1])
            values.append((mean, num_told))
            num_untold += num_told * (k - 1)
            self._told_counts[i] += num_told * k
            self._told_sums[i] += mean * num_told * k
        return values, num_untold


class MetricExporter:
    """The registry's metrics with this model's labels. Does nothing where the server was started without metrics.

    NOTE: making a metric family there is an error, and reading an error of this kind can crash the process (see
    `drain`), so the caller must know beforehand: `is_on`.
    """

    def __init__(self, model_name: str, model_version: str, is_on: bool = True) -> None:
        self._labels = {"model": model_name, "version": model_version}
        self._families: dict[str, Any] = {}  # a family must outlive its metrics
        self._metrics: dict[tuple[str, tuple[str, ...]], Any] = {}
        self._last_value: dict[tuple[str, tuple[str, ...]], float] = {}
        self._is_on = is_on
        # Servers before 24.08 have no histograms.
        self._has_histograms = hasattr(pb_utils, "MetricFamily") and hasattr(pb_utils.MetricFamily, "HISTOGRAM")

    def close(self) -> None:
        """Give the metrics back to the server; the caller must be the last to speak to it."""
        self._is_on = False
        self._metrics.clear()
        self._families.clear()

    def count(self, name: str, description: str, increment: float, **labels: str) -> None:
        """Add to a counter; 0 makes it appear."""
        metric = self._metric(name, description, "COUNTER", labels)
        if metric is not None and increment > 0:
            metric.increment(increment)

    def set(self, name: str, description: str, amount: float, **labels: str) -> None:
        metric = self._metric(name, description, "GAUGE", labels)
        key = (name, tuple(labels.values()))
        if metric is not None and self._last_value.get(key) != amount:
            metric.set(amount)
            self._last_value[key] = amount

    def observe(self, name: str, description: str, bounds: Sequence[float], values: list[tuple[float, int]]) -> None:
        """Tell a histogram each value as often as said; none makes it appear."""
        if not self._has_histograms:
            return
        metric = self._metric(name, description, "HISTOGRAM", {}, bounds)
        if metric is not None:
            for value, count in values:
                for _ in range(count):
                    metric.observe(value)

    def _metric(
        self, name: str, description: str, kind: str, labels: dict[str, str], bounds: Sequence[float] = ()
    ) -> Any | None:
        """The metric, made at its first use; None once the server has said that it has no metrics."""
        if not self._is_on:
            return None
        key = (name, tuple(labels.values()))
        if key in self._metrics:
            return self._metrics[key]
        try:
            if name not in self._families:
                kind_id = getattr(pb_utils.MetricFamily, kind)
                self._families[name] = pb_utils.MetricFamily(name=name, description=description, kind=kind_id)
            arguments: dict[str, Any] = {"labels": {**self._labels, **labels}}
            if bounds:
                arguments["buckets"] = [float(bound) for bound in bounds]
            metric = self._metrics[key] = self._families[name].Metric(**arguments)
            return metric
        except pb_utils.TritonModelException as error:
            logger.warning("the server exports no metrics of this model: %s", error)
            self._is_on = False
            return None
