"""Counters, gauges and histograms in the server's registry, made at their first use.

The registry is the server's: metrics of the same name and labels are one and the same in all its processes. So
counters and histograms of several front ends add up, and of gauges the last `set` counts. (Found on server 2.51: a
histogram's buckets are those of whoever made it first.)

A metric is never given back while another front end may hold it, because server 2.51 frees it though: what that one
tells of it next is written to freed memory, and the server aborts or hangs. So counters and histograms stay until the
server ends, and go on growing when the model is loaded again; a gauge goes with the last front end that holds it.

Every call is a blocking message to the server, 14 to 80 microseconds. Only the housekeeping thread makes them, and
`MAX_OBSERVATIONS` bounds what a round costs; a histogram can be told values only one by one. What a metric means is
not known here.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import triton_python_backend_utils as pb_utils

from cb_backend.serving.gauge_holders import GaugeHolders

MAX_OBSERVATIONS = 1000  # in one round, two of which come in a second
REPEAT_S = 5.0  # a gauge is set again though it has not changed: another generation may have set it last

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

    def __init__(
        self, model_name: str, model_version: str, is_on: bool = True, holders: GaugeHolders | None = None
    ) -> None:
        """`holders`: None where no other front end can have the same labels."""
        self._labels = {"model": model_name, "version": model_version}
        self._holders = holders
        self._metrics: dict[str, Any] = {}
        self._families: dict[str, Any] = {}  # of each metric one: a metric is given back with its family
        self._gauges: set[str] = set()
        self._last_value: dict[str, float] = {}  # of the gauges, since `_last_repeat`
        self._last_repeat = time.monotonic()
        self._is_speaker = True
        self._is_on = is_on
        # Servers before 24.08 have no histograms.
        self._has_histograms = hasattr(pb_utils, "MetricFamily") and hasattr(pb_utils.MetricFamily, "HISTOGRAM")

    def begin_round(self) -> None:
        """Before a round of calls: find out whether the gauges are this front end's to set."""
        if not self._is_on:
            return
        if self._holders is not None:
            was_speaker, self._is_speaker = self._is_speaker, self._holders.is_speaker()
            if self._is_speaker and not was_speaker:
                self._last_value.clear()
        if time.monotonic() - self._last_repeat >= REPEAT_S:
            self._last_repeat = time.monotonic()
            self._last_value.clear()

    def close(self) -> None:
        """Give back the gauges that nobody else holds; the caller must be the last to speak to the server."""
        self._is_on = False
        everything = contextlib.nullcontext(frozenset(self._gauges))
        with everything if self._holders is None else self._holders.leaving() as given_back:
            self._metrics.clear()
            for key in self._gauges & given_back:
                ctypes.pythonapi.Py_DecRef(ctypes.py_object(self._families[key]))
            self._families.clear()

    def count(self, name: str, description: str, increment: float, **labels: str) -> None:
        """Add to a counter; 0 makes it appear."""
        metric = self._metric(name, description, "COUNTER", labels)
        if metric is not None and increment > 0:
            metric.increment(increment)

    def count_since(self, counters: Mapping[str, tuple[str, str]], stats: object, before: object) -> None:
        """Add what has come since `before`, the same engine's earlier figures; None: there are none. counters: name ->
        (attribute of both, description)."""
        for name, (field, description) in counters.items():
            base = 0 if before is None else getattr(before, field)
            self.count(name, description, getattr(stats, field) - base)

    def set(self, name: str, description: str, amount: float, **labels: str) -> None:
        if not self._is_speaker:
            return
        metric = self._metric(name, description, "GAUGE", labels)
        key = _key(name, labels)
        if metric is not None and self._last_value.get(key) != amount:
            metric.set(amount)
            self._last_value[key] = amount

    def set_alone(self, name: str, description: str, amount: float, **labels: str) -> None:
        """A gauge of which one set of labels is there at a time. What was set with others is given back, as soon as
        that can be: where labels say what comes and goes, the registry would grow for ever."""
        self.set(name, description, amount, **labels)
        if _key(name, labels) in self._metrics:
            for key in [key for key in self._gauges if key != _key(name, labels) and _name_of(key) == name]:
                self._give_back(key)

    def _give_back(self, key: str) -> None:
        may_go = contextlib.nullcontext(True) if self._holders is None else self._holders.dropping(key)
        with may_go as is_alone:
            if not is_alone:
                return
            self._gauges.remove(key)
            self._last_value.pop(key, None)
            del self._metrics[key]
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(self._families[key]))
            del self._families[key]

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
        """The metric, made at its first use; None once the server has said that it has no metrics, and where a gauge
        cannot be noted with `holders` now."""
        if not self._is_on:
            return None
        key = _key(name, labels)
        if key in self._metrics:
            return self._metrics[key]
        is_gauge = kind == "GAUGE"
        if is_gauge and self._holders is not None and not self._holders.note(key):
            return None
        try:
            family = pb_utils.MetricFamily(
                name=name, description=description, kind=getattr(pb_utils.MetricFamily, kind)
            )
            # NOTE: a reference that stays. The family's end would give the metric back, at the latest with the
            # interpreter's, which comes after the end of the line to the server.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(family))
            arguments: dict[str, Any] = {"labels": {**self._labels, **labels}}
            if bounds:
                arguments["buckets"] = [float(bound) for bound in bounds]
            metric = family.Metric(**arguments)
        except pb_utils.TritonModelException as error:
            logger.warning("the server exports no metrics of this model: %s", error)
            self._is_on = False
            return None
        self._families[key], self._metrics[key] = family, metric
        self._gauges |= {key} if is_gauge else set()
        return metric


def _name_of(key: str) -> str:
    return str(json.loads(key)[0])


def _key(name: str, labels: dict[str, str]) -> str:
    """Of a metric among those of one model and version."""
    return json.dumps([name, *labels.values()])
