"""/metrics of a real server beside what its client measured. pytest tests/server/test_metrics.py

The text is read by `metrics_text`.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cb_backend.cli.paths import load_client
from tests.server.conftest import RunningServer, running_server
from tests.server.metrics_text import Snapshot, about, ended, measure, settled
from tests.server.tiny_checkpoint import MAX_MODEL_LEN
from tests.waiting import eventually

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Two front ends of `llm`, and the model `named` whose config asks for vLLM's names."""
    folder = tmp_path_factory.mktemp("repository")

    def add_named(repository: Path) -> None:
        shutil.copytree(repository / "llm", repository / "named")
        config = repository / "named" / "config.pbtxt"
        parameter = 'parameters: { key: "REPORT_CUSTOM_METRICS" value: { string_value: "true" } }'
        config.write_text(f"{config.read_text()}\n{parameter}\n")

    with running_server(checkpoint, folder, prepare=add_named) as running:
        yield running


def test_histograms_agree_with_the_client(server: RunningServer) -> None:
    before = settled(server, 0)
    with ThreadPoolExecutor(6) as pool:
        jobs = [pool.submit(measure, server, f"the quick brown fox {i}" * (1 + i), 10 + 5 * i) for i in range(6)]
        measured = [job.result() for job in jobs]
    after = settled(server, ended(before) + 6)

    def grown(name: str) -> tuple[float, float]:
        count, total = after.histogram(name)
        old_count, old_total = before.histogram(name)
        return count - old_count, total - old_total

    num_tokens = sum(m.num_output_tokens for m in measured)
    assert num_tokens == sum(10 + 5 * i for i in range(6))
    assert grown("cb_request_prompt_tokens") == (6, about(sum(m.num_prompt_tokens for m in measured)))
    assert grown("cb_request_output_tokens") == (6, about(num_tokens))
    # The client's clock runs longer: connecting, and the way there and back. How much longer is the machine's business.
    for name, seen in (
        ("cb_time_to_first_token_seconds", sum(m.times[0] for m in measured)),
        ("cb_e2e_request_latency_seconds", sum(m.times[-1] for m in measured)),
    ):
        count, total = grown(name)
        assert count == 6
        assert 0 < total <= seen
    count, between_tokens = grown("cb_inter_token_latency_seconds")
    assert count == num_tokens - 6, "one value a token but the first"
    parts = [grown(f"cb_request_{part}_time_seconds") for part in ("queue", "prefill", "decode")]
    assert [count for count, _ in parts] == [6, 6, 6]
    assert parts[2][1] == pytest.approx(between_tokens, rel=1e-6)
    assert sum(total for _, total in parts) <= grown("cb_e2e_request_latency_seconds")[1]
    for name, expected in (
        ("cb_output_tokens_total", num_tokens),
        ("cb_prompt_tokens_total", sum(m.num_prompt_tokens for m in measured)),
        ("cb_responses_total", sum(len(m.times) for m in measured)),
    ):
        assert after.value(name) - before.value(name) == expected
    num_steps = after.value("cb_steps_total") - before.value("cb_steps_total")
    assert num_steps >= 35, "the longest answer has 35 tokens"
    assert grown("cb_step_seconds")[0] == grown("cb_step_requests")[0] == num_steps
    # Every request runs once for each of its tokens; a prompt is one chunk here.
    assert grown("cb_step_requests")[1] == about(num_tokens)
    assert grown("cb_step_tokens")[1] == about(num_tokens - 6 + sum(m.num_prompt_tokens for m in measured))
    assert after.value("cb_step_host_seconds_total") > before.value("cb_step_host_seconds_total")


EACH = 600  # tokens; the first batch of them takes seconds, in which it must be seen


def usage(snapshot: Snapshot) -> float:
    return snapshot.value("cb_kv_cache_usage")


def test_gauges_follow_a_full_batch_and_come_back(server: RunningServer) -> None:
    before = settled(server, 0)
    with ThreadPoolExecutor(24) as pool:
        jobs = [pool.submit(measure, server, f"fox {i}", EACH) for i in range(24)]

        def is_full() -> bool:
            busy = Snapshot(server)
            scheduled = busy.value("nv_trt_llm_request_metrics", request_type="scheduled")
            is_waiting = 0 < busy.value("cb_requests_waiting") <= 8
            return scheduled == busy.value("cb_requests_running") == 16 and is_waiting and 0 < usage(busy) < 1

        eventually(is_full, "the batch is full, and the others wait")
        assert sum(job.result().num_output_tokens for job in jobs) == 24 * EACH
    idle = settled(server, ended(before) + 24)
    assert [idle.value("cb_requests_running"), idle.value("cb_requests_waiting"), usage(idle)] == [0, 0, 0]
    for kind in ("active", "scheduled", "waiting"):
        assert idle.value("nv_trt_llm_request_metrics", request_type=kind) == 0
    blocks = {
        kind: idle.value("nv_trt_llm_kv_cache_block_metrics", kv_cache_block_type=kind)
        for kind in ("max", "free", "used", "tokens_per", "fraction")
    }
    assert blocks["max"] == blocks["free"] > 0
    assert (blocks["used"], blocks["fraction"], blocks["tokens_per"]) == (0, 0, 16)
    assert idle.value("nv_trt_llm_request_metrics", request_type="max") == 16
    assert idle.value("cb_output_tokens_total") - before.value("cb_output_tokens_total") == 24 * EACH
    itl = "cb_inter_token_latency_seconds"
    told = idle.histogram(itl)[0] - before.histogram(itl)[0]
    untold = idle.value("cb_unobserved_values_total", histogram=itl)
    untold -= before.value("cb_unobserved_values_total", histogram=itl)
    assert told + untold == 24 * (EACH - 1)


def test_vllm_names_only_where_asked_for(server: RunningServer) -> None:
    named = measure(server, "the quick brown fox", 20, model="named")
    now = settled(server, 1, model="named")
    ours = [family for name, family in now.families.items() if name.startswith("vllm:")]
    assert len(ours) == 12
    assert {dict(labels)["model"] for family in ours for _, labels in family.samples} == {"named"}
    assert now.histogram("vllm:request_prompt_tokens", "named") == (1, named.num_prompt_tokens)
    assert now.histogram("vllm:request_generation_tokens", "named") == (1, 20)
    assert now.histogram("vllm:time_per_output_token_seconds", "named")[0] == 19
    assert now.histogram("vllm:request_params_n", "named") == (1, 1)
    for name in ("time_to_first_token", "e2e_request_latency"):
        assert now.histogram(f"vllm:{name}_seconds", "named") == now.histogram(f"cb_{name}_seconds", "named")
    assert now.value("vllm:prompt_tokens_total", model="named") == named.num_prompt_tokens
    assert now.value("vllm:generation_tokens_total", model="named") == 20
    for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert (f"vllm:{gauge}", frozenset({("model", "named"), ("version", "1")})) in now.families[
            f"vllm:{gauge}"
        ].samples
    blocks = now.value("nv_trt_llm_kv_cache_block_metrics", model="named", kv_cache_block_type="max")
    sizes = {"block_size": "16", "num_gpu_blocks": str(int(blocks))}
    assert now.value("vllm:cache_config_info", model="named", **sizes) == 1


def test_counters_never_fall_over_a_killed_engine(server: RunningServer, checkpoint: Path) -> None:
    measure(server, "fox", 30)
    before = settled(server, 1)
    restarts = before.value("cb_engine_restarts_total")
    engine = engine_of(server, "llm")
    with ThreadPoolExecutor(1) as pool:
        broken = pool.submit(measure, server, "the quick", MAX_MODEL_LEN - 100)
        eventually(lambda: Snapshot(server).value("cb_requests_running") == 1, "the request runs")
        weights = checkpoint / "model.safetensors"
        hidden = weights.rename(checkpoint / "hidden")  # so that the next engine cannot start before this is seen
        try:
            os.kill(engine, signal.SIGKILL)
            with pytest.raises(load_client().ClientError):
                broken.result()
            eventually(lambda: Snapshot(server).value("cb_engine_up") == 0, "the death is seen")
            assert Snapshot(server).value("cb_requests_running") == usage(Snapshot(server)) == 0
        finally:
            hidden.rename(weights)
    eventually(lambda: Snapshot(server).value("cb_engine_restarts_total") == restarts + 1, "it is started again")
    measure(server, "fox", 30)
    after = settled(server, ended(before) + 2)
    fallen = [key for key, value in before.counters().items() if after.counters()[key] < value]
    assert fallen == []
    assert after.value("cb_engine_up") == 1
    assert after.value("cb_output_tokens_total") >= before.value("cb_output_tokens_total") + 30
    unavailable = [snapshot.value("cb_requests_total", outcome="unavailable") for snapshot in (before, after)]
    assert unavailable[1] == unavailable[0] + 1


def engine_of(server: RunningServer, model: str) -> int:
    """The engine whose parent is a front end of the model: its stub's command line names the instance."""
    for pid in server.engine_pids():
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        if f"{model}_0" in Path(f"/proc/{parent}/cmdline").read_text():
            return pid
    raise AssertionError(f"no engine of {model}")
