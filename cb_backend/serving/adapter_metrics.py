"""What the server exports about adapters, of engines that take them: names, meanings, figures.

`vllm:lora_requests_info` is there whatever config.pbtxt says, because gateways that choose among servers read which
adapters are in use from it. Names of adapters are labels there and nowhere else: one set of them at a time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from cb_backend.contracts.messages import AdapterStats
from cb_backend.serving.metric_exporter import MetricExporter

MAX_NAMES = 100  # in one label

# name -> (field of AdapterStats, description)
_COUNTERS = {
    "cb_adapter_loads_total": ("num_loads", "Copies of adapters from host memory to a place on the device"),
    "cb_adapter_reads_total": ("num_reads", "Adapters read from their files, refused ones included"),
    "cb_refused_adapters_total": ("num_refused", "Adapters whose files could not be served"),
    "cb_adapter_read_seconds_total": (
        "read_seconds",
        "Reading, checking and packing adapters, beside the engine's loop",
    ),
}


def publish_adapter_state(exporter: MetricExporter, engines: Sequence[AdapterStats]) -> None:
    """Of all engines together that are up; none of them where no engine takes adapters."""
    if not engines:
        return
    places = "Adapters that have a place on the device"
    exporter.set("cb_adapters_resident", places, sum(stats.num_resident for stats in engines))
    exporter.set("cb_adapter_places", "Adapters that can be in one batch", sum(stats.max_loras for stats in engines))
    kept = "Adapters in host memory"
    exporter.set("cb_adapters_in_host_memory", kept, sum(stats.num_kept for stats in engines))
    exporter.set_alone(
        "vllm:lora_requests_info",
        "Adapters of running and waiting requests; the value is the time of this telling",
        time.time(),
        max_lora=str(sum(stats.max_loras for stats in engines)),
        running_lora_adapters=_label(engines, "running"),
        waiting_lora_adapters=_label(engines, "waiting"),
    )


def publish_adapter_counts(exporter: MetricExporter, stats: AdapterStats, before: AdapterStats | None) -> None:
    """What has come since `before`, of one engine."""
    exporter.count_since(_COUNTERS, stats, before)


def _label(engines: Sequence[AdapterStats], field: str) -> str:
    names = sorted({name for stats in engines for name in getattr(stats, field)})
    return ",".join(names[:MAX_NAMES])
