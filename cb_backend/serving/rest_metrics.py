"""What the server exports about sleep, of engines that may: names, meanings, figures."""

from __future__ import annotations

from collections.abc import Sequence

from cb_backend.contracts.rest import ASLEEP, RestStats
from cb_backend.serving.metric_exporter import MetricExporter

# name -> (field of RestStats, description)
_COUNTERS = {
    "cb_sleeps_total": ("num_sleeps", "Times that an engine fell asleep"),
    "cb_wakes_total": ("num_wakes", "Times that an engine woke"),
    "cb_asleep_seconds_total": ("asleep_seconds", "Time that engines were asleep, up to their last wake or news"),
    "cb_wake_seconds_total": ("wake_seconds", "Bringing memory and weights back; per wake: / wakes"),
    "cb_weight_updates_total": ("num_updates", "Times that an engine took other weights without a restart"),
}


def publish_rest_state(exporter: MetricExporter, engines: Sequence[RestStats]) -> None:
    """Of all engines together that are up; none of them where no engine may sleep."""
    if not engines:
        return
    lost = "Engines with the configured weights, because those of an update could not be loaded again"
    exporter.set("cb_engines_with_lost_update", lost, sum(bool(stats.lost_update) for stats in engines))
    held = "Memory of the device that weights and KV cache hold now"
    exporter.set("cb_model_memory_bytes", held, sum(stats.held_bytes for stats in engines))
    # Last: each is a message of its own, and whoever reads that an engine is asleep finds the memory of one that is.
    exporter.set("cb_engines_asleep", "Engines that are asleep", sum(stats.state == ASLEEP for stats in engines))


def publish_rest_counts(exporter: MetricExporter, stats: RestStats, before: RestStats | None) -> None:
    """What has come since `before`, of one engine."""
    exporter.count_since(_COUNTERS, stats, before)
