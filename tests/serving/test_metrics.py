"""Metrics as the server would export them."""

from __future__ import annotations

from collections import Counter

import pytest

from cb_backend.messages import EngineStats, ModelInfo
from cb_backend.serving.metrics import Metrics
from tests.serving.fake_server import MetricFamily

INFO = ModelInfo(
    model="m", tokenizer_dir="t", vocab_size=10, max_model_len=64, eos_token_ids=(), block_size=16, num_blocks=100,
    max_num_seqs=8, dtype="float32", device="cpu",
)  # fmt: skip


def stats(**values: int) -> EngineStats:
    names = [name for name in EngineStats.__struct_fields__ if name not in values]
    return EngineStats(**dict.fromkeys(names, 0), **values)


def exported(name: str, **labels: str) -> float:
    key = tuple(sorted({"model": "llm", "version": "1", **labels}.items()))
    return MetricFamily.exported[name, key].value


@pytest.fixture(autouse=True)
def _fresh() -> None:
    MetricFamily.exported.clear()


def test_engine_state_and_counts() -> None:
    metrics = Metrics("llm", "1")
    metrics.publish_engine(
        stats(num_running=5, num_waiting=2, num_blocks=100, num_free_blocks=75, num_output_tokens=40), INFO
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
    metrics.publish_engine(stats(num_blocks=100, num_free_blocks=100, num_output_tokens=65), INFO)
    assert exported("cb_output_tokens_total") == 65
    assert exported("nv_trt_llm_request_metrics", request_type="active") == 0


def test_counts_go_on_over_a_restart_of_the_engine() -> None:
    metrics = Metrics("llm", "1")
    for count in (40, 60, 10, 15):  # started anew after 60
        metrics.publish_engine(stats(num_output_tokens=count), INFO)
    assert exported("cb_output_tokens_total") == 60 + 15


def test_the_next_publisher_counts_on_from_where_it_takes_over() -> None:
    first, second = Metrics("llm", "1"), Metrics("llm", "1")
    first.publish_engine(stats(num_output_tokens=40), INFO)
    second.skip_engine(stats(num_output_tokens=40))
    second.publish_engine(stats(num_output_tokens=50), INFO)
    assert exported("cb_output_tokens_total") == 50


def test_front_ends_add_their_own_counts_up() -> None:
    first, second = Metrics("llm", "1"), Metrics("llm", "1")
    first.publish(Counter(length=3, responses=10))
    first.publish(Counter(length=4, responses=12))
    second.publish(Counter(length=1, cancelled=2, responses=5))
    assert exported("cb_requests_total", outcome="length") == 5
    assert exported("cb_requests_total", outcome="cancelled") == 2
    assert exported("cb_responses_total") == 17


def test_a_server_without_metrics_is_left_alone() -> None:
    metrics = Metrics("llm", "1", is_on=False)
    metrics.publish(Counter(length=3))
    metrics.publish_engine(stats(num_running=1), INFO)
    assert MetricFamily.exported == {}
