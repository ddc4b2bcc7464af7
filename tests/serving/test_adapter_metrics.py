"""Metrics of adapters: pytest tests/serving/test_adapter_metrics.py"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cb_backend.contracts.messages import AdapterStats, EngineStats
from cb_backend.serving.adapter_metrics import MAX_NAMES
from cb_backend.serving.gauge_holders import GaugeHolders
from cb_backend.serving.metric_exporter import MetricExporter
from cb_backend.serving.metrics import EngineReport, Metrics
from tests.serving.fake_server import MetricFamily
from tests.serving.test_metrics import INFO
from tests.serving.test_metrics import stats as engine_stats

INFO_NAME = "vllm:lora_requests_info"


@pytest.fixture(autouse=True)
def _empty_registry() -> None:
    MetricFamily.exported.clear()


def told(**values: Any) -> EngineStats:
    return engine_stats(adapters=AdapterStats(**{"max_loras": 4, **values}))


def publish(metrics: Metrics, *engines: EngineStats, up: bool = True) -> None:
    metrics.publish_engines({index: EngineReport(stats, INFO, up) for index, stats in enumerate(engines)})


def value(name: str) -> float:
    [metric] = [metric for (family, _), metric in MetricFamily.exported.items() if family == name]
    return metric.value


def info_labels() -> list[dict[str, str]]:
    return [dict(labels) for name, labels in MetricFamily.exported if name == INFO_NAME]


def test_the_state_of_adapters_and_who_is_in_use() -> None:
    metrics = Metrics(MetricExporter("llm", "1"))
    publish(metrics, told(running=("sheep", "doll"), waiting=("wolf",), num_resident=3, num_kept=7))
    assert [value(f"cb_{name}") for name in ("adapters_resident", "adapters_in_host_memory", "adapter_places")] == [
        3, 7, 4
    ]  # fmt: skip
    [labels] = info_labels()
    assert labels == {
        "model": "llm", "version": "1", "max_lora": "4", "running_lora_adapters": "doll,sheep",
        "waiting_lora_adapters": "wolf",
    }  # fmt: skip
    assert value(INFO_NAME) > 1_600_000_000, "a time, by which a gateway knows the newest"


def test_only_the_newest_names_stay_in_the_registry() -> None:
    metrics = Metrics(MetricExporter("llm", "1"))
    for number in range(50):
        publish(metrics, told(running=(f"a{number}",)))
        assert [labels["running_lora_adapters"] for labels in info_labels()] == [f"a{number}"]
    publish(metrics, told(running=("a7",)))
    assert [labels["running_lora_adapters"] for labels in info_labels()] == ["a7"], (
        "names that come again are made again"
    )
    publish(metrics, told())
    [labels] = info_labels()
    assert (labels["running_lora_adapters"], labels["waiting_lora_adapters"]) == ("", "")


def test_names_that_another_front_end_holds_stay_until_it_goes(tmp_path: Path) -> None:
    """The fake server notes a message about a metric that was given back as a violation."""
    folder = tmp_path / "gauges"
    old, new = (Metrics(MetricExporter("llm", "1", True, GaugeHolders(folder, name))) for name in ("a", "b"))
    first = told(running=("doll",))
    old._exporter.begin_round()
    publish(old, first)
    new._exporter.begin_round()
    publish(new, first)
    publish(new, told(running=("sheep",)))
    assert sorted(labels["running_lora_adapters"] for labels in info_labels()) == ["doll", "sheep"]
    publish(old, first)
    old.close()
    publish(new, told(running=("wolf",)))
    assert [labels["running_lora_adapters"] for labels in info_labels()] == ["wolf"]
    new.close()
    assert info_labels() == []


def test_several_engines_are_one() -> None:
    metrics = Metrics(MetricExporter("llm", "1"))
    publish(metrics, told(running=("a", "b"), num_resident=2), told(running=("b", "c"), num_resident=1))
    [labels] = info_labels()
    assert (labels["running_lora_adapters"], labels["max_lora"]) == ("a,b,c", "8")
    assert value("cb_adapters_resident") == 3


def test_counts_grow_and_a_new_engine_begins_at_0() -> None:
    metrics = Metrics(MetricExporter("llm", "1"))
    names = ("adapter_loads", "adapter_reads", "refused_adapters", "adapter_read_seconds")
    fields = ("num_loads", "num_reads", "num_refused", "read_seconds")
    publish(metrics, told(**dict(zip(fields, (5, 3, 1, 0.5), strict=True))))
    publish(metrics, told(**dict(zip(fields, (7, 4, 1, 0.75), strict=True))))
    assert [value(f"cb_{name}_total") for name in names] == [7, 4, 1, 0.75]
    restarted = AdapterStats(max_loras=4, num_loads=2, num_reads=1)
    publish(metrics, engine_stats(engine_pid=99, adapters=restarted))
    assert [value(f"cb_{name}_total") for name in names] == [9, 5, 1, 0.75]


def test_very_many_names_are_cut() -> None:
    publish(Metrics(MetricExporter("llm", "1")), told(waiting=tuple(f"a{i:04}" for i in range(1000))))
    [labels] = info_labels()
    assert labels["waiting_lora_adapters"].count(",") == MAX_NAMES - 1


def test_a_model_without_adapters_has_none_of_them() -> None:
    publish(Metrics(MetricExporter("llm", "1"), has_vllm_names=True), engine_stats())
    assert not [name for name, _ in MetricFamily.exported if "adapter" in name or "lora" in name]
