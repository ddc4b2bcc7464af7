"""Metrics as the server would export them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest

from cb_backend.contracts.messages import Buckets, EngineStats, ModelInfo, StepStats
from cb_backend.serving.latency import BOUNDS, Latencies, Totals
from cb_backend.serving.metric_exporter import MAX_OBSERVATIONS, MetricExporter
from cb_backend.serving.metrics import EngineReport, Metrics
from cb_backend.support.buckets import BucketCounts
from tests.serving.fake_server import MetricFamily

INFO = ModelInfo(
    model="m", tokenizer_dir="t", vocab_size=10, max_model_len=64, eos_token_ids=(), block_size=16, num_blocks=100,
    max_num_seqs=8, dtype="float32", device="cpu",
)  # fmt: skip


NO_TOTALS = Latencies().totals()


def make_metrics(has_vllm_names: bool = False, is_on: bool = True) -> Metrics:
    return Metrics(MetricExporter("llm", "1", is_on), has_vllm_names, INFO.max_model_len)


def publish_engine(metrics: Metrics, stats: EngineStats, info: ModelInfo, is_up: bool = True) -> None:
    metrics.publish_engines({0: EngineReport(stats, info, is_up)})


def stats(**values: Any) -> EngineStats:
    names = [name for name in EngineStats.__struct_fields__ if name not in values]
    return EngineStats(**{**dict.fromkeys(names, 0), "steps": None, "adapters": None, "rest": None, **values})


def step_stats(batch_sizes: list[int], **values: float) -> StepStats:
    sizes = BucketCounts((1, 2, 4, 8))
    for size in batch_sizes:
        sizes.add(size)
    buckets = Buckets(sizes.bounds, tuple(sizes.counts), tuple(sizes.sums))
    defaults = dict.fromkeys(("host_seconds", "launch_seconds", "wait_seconds", "num_scheduled_tokens"), 0)
    figures: dict[str, Any] = {"num_steps": len(batch_sizes), **defaults, **values}
    return StepStats(**figures, step_seconds=buckets, step_requests=buckets, step_tokens=buckets)


def totals_of(**values: list[float]) -> dict[str, Totals]:
    totals = {}
    for name, bounds in BOUNDS.items():
        buckets = BucketCounts(bounds)
        for value in values.get(name, ()):
            buckets.add(value)
        totals[name] = buckets.read()
    return totals


def observed(name: str) -> list[float]:
    return sorted(MetricFamily.exported[name, (("model", "llm"), ("version", "1"))].observed)


def exported(name: str, **labels: str) -> float:
    key = tuple(sorted({"model": "llm", "version": "1", **labels}.items()))
    return MetricFamily.exported[name, key].value


@pytest.fixture(autouse=True)
def _fresh() -> None:
    MetricFamily.exported.clear()


@pytest.mark.parametrize(("windows", "max_model_len", "tokens"), [
    ((0,), 64, 1600),  # one group: every block's
    ((0, 0), 64, 800),  # two that keep all: a token takes a block of each
    ((0, 32), 64, 914),  # a request of 64: four blocks of the first group, three of the second
    ((0, 32), 1024, 1528),  # of 1,024: 64 and 3
    ((0, 32), 1 << 20, 1552),  # of 1,552, the longest that fits: 97 and 3
    ((32,), 160, 5333),  # none keeps all: 3 blocks, however long
])  # fmt: skip
def test_tokens_that_the_cache_holds(windows: tuple[int, ...], max_model_len: int, tokens: int) -> None:
    """Blocks times their tokens are that of models without groups of layers alone."""
    info = msgspec.structs.replace(INFO, kv_windows=windows, max_model_len=max_model_len)
    publish_engine(make_metrics(), stats(num_blocks=100, num_free_blocks=75), info)
    assert exported("cb_kv_cache_tokens") == tokens
    two = {index: EngineReport(stats(num_blocks=100, num_free_blocks=75), info) for index in range(2)}
    make_metrics().publish_engines(two)
    assert exported("cb_kv_cache_tokens") == 2 * tokens


def test_a_cache_that_is_not_there_yet_holds_nothing() -> None:
    for windows in ((0,), (0, 32)):
        publish_engine(make_metrics(), stats(num_blocks=0), msgspec.structs.replace(INFO, kv_windows=windows))
        assert exported("cb_kv_cache_tokens") == 0


def test_engine_state_and_counts() -> None:
    metrics = make_metrics()
    publish_engine(
        metrics, stats(num_running=5, num_waiting=2, num_blocks=100, num_free_blocks=75, num_output_tokens=40), INFO
    )
    kinds = {kind: exported("nv_trt_llm_request_metrics", request_type=kind) for kind in ("active", "scheduled")}
    assert kinds == {"active": 7, "scheduled": 5}
    assert exported("nv_trt_llm_request_metrics", request_type="waiting") == 2
    assert exported("nv_trt_llm_request_metrics", request_type="max") == 8
    blocks = "nv_trt_llm_kv_cache_block_metrics"
    assert exported(blocks, kv_cache_block_type="used") == 25
    assert exported(blocks, kv_cache_block_type="free") == 75
    assert exported(blocks, kv_cache_block_type="max") == 100
    assert exported(blocks, kv_cache_block_type="tokens_per") == 16
    assert exported(blocks, kv_cache_block_type="fraction") == 0.25
    publish_engine(metrics, stats(num_blocks=100, num_free_blocks=100, num_output_tokens=65), INFO)
    assert exported("cb_output_tokens_total") == 65
    assert exported("nv_trt_llm_request_metrics", request_type="active") == 0


def test_counts_go_on_over_a_restart_of_the_engine() -> None:
    metrics = make_metrics()
    for pid, count in ((1, 40), (1, 60), (2, 70), (2, 75)):  # more than the first before it was ever heard of
        publish_engine(metrics, stats(num_output_tokens=count, engine_pid=pid), INFO)
    assert exported("cb_output_tokens_total") == 60 + 75
    assert exported("cb_engine_restarts_total") == 1


def test_a_dead_engine_has_no_requests() -> None:
    metrics = make_metrics()
    busy = stats(num_running=5, num_waiting=2, num_swapped=1, num_blocks=100, num_free_blocks=75)
    publish_engine(metrics, busy, INFO)
    assert exported("cb_engine_up") == exported("cb_requests_swapped") == 1
    publish_engine(metrics, busy, INFO, is_up=False)
    assert exported("cb_engine_up") == exported("cb_requests_running") == exported("cb_requests_waiting") == 0
    assert exported("cb_requests_swapped") == 0
    assert exported("nv_trt_llm_kv_cache_block_metrics", kv_cache_block_type="used") == 0
    assert exported("nv_trt_llm_kv_cache_block_metrics", kv_cache_block_type="free") == 100


def test_steps_are_told_once_over_a_restart() -> None:
    metrics = make_metrics()
    publish_engine(metrics, stats(engine_pid=1, steps=step_stats([1, 2, 8], host_seconds=0.5)), INFO)
    publish_engine(metrics, stats(engine_pid=1, steps=step_stats([1, 2, 8, 8], host_seconds=0.75)), INFO)
    publish_engine(metrics, stats(engine_pid=2, steps=step_stats([4], host_seconds=0.25)), INFO)
    assert observed("cb_step_requests") == [1, 2, 4, 8, 8]
    assert exported("cb_step_host_seconds_total") == 1.0
    assert exported("cb_steps_total") == 5


def test_latencies_keep_count_sum_and_bucket() -> None:
    metrics = make_metrics()
    metrics.publish(Counter(), totals_of(inter_token=[0.0041, 0.0049, 0.3], queue_time=[0.2]))
    metrics.publish(Counter(), totals_of(inter_token=[0.0041, 0.0049, 0.3, 0.0043], queue_time=[0.2]))
    assert observed("cb_inter_token_latency_seconds") == pytest.approx([0.0043, 0.0045, 0.0045, 0.3])
    assert observed("cb_request_queue_time_seconds") == [0.2]
    assert observed("cb_request_decode_time_seconds") == []
    assert not any(name.startswith("vllm:") for name, _ in MetricFamily.exported)


def test_too_many_values_become_a_sample_that_says_so() -> None:
    metrics = make_metrics()
    fast, slow, requests = [0.0045] * 4 * MAX_OBSERVATIONS, [0.4] * MAX_OBSERVATIONS, [0.2] * 50
    totals = totals_of(inter_token=fast + slow, queue_time=requests)
    metrics.publish(Counter(), totals)
    told = observed("cb_inter_token_latency_seconds")
    assert MAX_OBSERVATIONS / 2 < len(told) <= MAX_OBSERVATIONS - 50
    assert sum(value > 0.1 for value in told) / len(told) == pytest.approx(0.2, rel=0.02)
    assert observed("cb_request_queue_time_seconds") == pytest.approx(requests), "the few are told in full"
    for _ in range(3):  # what a division left over
        metrics.publish(Counter(), totals)
    untold = exported("cb_unobserved_values_total", histogram="cb_inter_token_latency_seconds")
    assert len(observed("cb_inter_token_latency_seconds")) + untold == 5 * MAX_OBSERVATIONS


def test_vllm_names_and_buckets_where_asked_for() -> None:
    metrics = make_metrics(has_vllm_names=True)
    metrics.publish(Counter(), totals_of(time_to_first_token=[0.05, 3.0], num_answers=[1, 1]))
    engine = stats(num_running=3, num_blocks=100, num_free_blocks=75, num_prompt_tokens=18, num_output_tokens=48)
    publish_engine(metrics, engine, INFO)
    key = (("model", "llm"), ("version", "1"))
    first_token = MetricFamily.exported["vllm:time_to_first_token_seconds", key]
    assert first_token.observed == [0.05, 3.0]
    assert first_token.buckets == (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
    assert set(first_token.buckets) <= set(BOUNDS["time_to_first_token"])
    for source, name in (
        ("inter_token", "time_per_output_token_seconds"),
        ("e2e_latency", "e2e_request_latency_seconds"),
    ):
        assert set(MetricFamily.exported[f"vllm:{name}", key].buckets) <= set(BOUNDS[source])
    assert MetricFamily.exported["vllm:request_prompt_tokens", key].buckets == (1, 2, 5, 10, 20, 50)  # max_model_len 64
    assert observed("vllm:request_params_n") == [1, 1]
    assert (exported("vllm:prompt_tokens_total"), exported("vllm:generation_tokens_total")) == (18, 48)
    assert (exported("vllm:num_requests_running"), exported("vllm:num_requests_waiting")) == (3, 0)
    assert exported("vllm:kv_cache_usage_perc") == 0.25
    assert exported("vllm:cache_config_info", block_size="16", num_gpu_blocks="100") == 1


def test_the_next_publisher_counts_on_from_where_it_takes_over() -> None:
    first, second = make_metrics(), make_metrics()
    publish_engine(first, stats(num_output_tokens=40), INFO)
    second.skip_engine(0, stats(num_output_tokens=40))
    publish_engine(second, stats(num_output_tokens=50), INFO)
    assert exported("cb_output_tokens_total") == 50


def test_front_ends_add_their_own_counts_up() -> None:
    first, second = make_metrics(), make_metrics()
    first.publish(Counter(length=3, responses=10), NO_TOTALS)
    first.publish(Counter(length=4, responses=12), NO_TOTALS)
    second.publish(Counter(length=1, cancelled=2, responses=5), NO_TOTALS)
    assert exported("cb_requests_total", outcome="length") == 5
    assert exported("cb_requests_total", outcome="cancelled") == 2
    assert exported("cb_responses_total") == 17


def test_a_server_without_metrics_is_left_alone() -> None:
    metrics = make_metrics(is_on=False)
    metrics.publish(Counter(length=3), NO_TOTALS)
    publish_engine(metrics, stats(num_running=1), INFO)
    assert MetricFamily.exported == {}
