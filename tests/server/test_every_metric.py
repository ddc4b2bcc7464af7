"""Each gauge and each histogram of /metrics held against what clients saw: pytest tests/server/test_every_metric.py

One that is added without a check here fails the last line of its test. The bounds are of the kind that holds on any
machine: a client's interval contains the server's, parts sum up, and what can be counted is equal.

The server's ORCA header is made of three of the gauges (used, max and tokens_per of the KV blocks). The server that the
tests run is built without it, so these are checked here and the header is not.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from cb_backend.cli.paths import load_client
from tests.server.conftest import RunningServer, running_server
from tests.server.metrics_text import Measured, Snapshot, about, ended, measure, settled
from tests.waiting import WAIT_S, eventually

pytestmark = pytest.mark.server

MODEL = "named"  # with vLLM's names as well
NUM_SLOTS, NUM_WAITING = 2, 1
ENDLESS = 16_000  # tokens; nobody waits for so many
BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """One front end and two slots for `named`; `llm` is only there to be another model."""

    def add_named(repository: Path) -> None:
        shutil.copytree(repository / "llm", repository / MODEL)
        config = repository / MODEL / "config.pbtxt"
        parameter = 'parameters: { key: "REPORT_CUSTOM_METRICS" value: { string_value: "true" } }'
        config.write_text(f"{config.read_text()}\n{parameter}\n")

    folder = tmp_path_factory.mktemp("repository")
    arguments = {"max_num_seqs": NUM_SLOTS, "block_size": BLOCK_SIZE}
    with running_server(checkpoint, folder, front_ends=1, prepare=add_named, **arguments) as running:
        yield running


def exported(snapshot: Snapshot, kind: str) -> set[str]:
    """Names of this kind that the model has; a gauge with a label of its own counts once a value of it."""
    own = {"request_type", "kv_cache_block_type"}
    found = set()
    for name, family in snapshot.families.items():
        for _, labels in family.samples:
            labels = dict(labels)  # type: ignore[assignment]
            if family.kind == kind and labels.get("model") == MODEL:
                found.add(" ".join([name, *(value for key, value in labels.items() if key in own)]))
    return found


@dataclass
class Open:
    """A stream that is being read."""

    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    is_closed: threading.Event = field(default_factory=threading.Event)

    def read(self, server: RunningServer, prompt: str) -> None:
        client = load_client().Client(server.url, MODEL, timeout=WAIT_S)
        answer = client.responses(prompt, is_streaming=True, max_tokens=ENDLESS, temperature=0, ignore_eos=True)
        try:
            for response in answer:
                self.num_prompt_tokens = max(self.num_prompt_tokens, response.num_input_tokens)
                self.num_output_tokens += response.num_output_tokens
                if self.is_closed.is_set():
                    break
        except load_client().ClientError:
            assert self.is_closed.is_set()
        finally:
            answer.close()


def test_every_histogram_against_the_clients(server: RunningServer) -> None:
    before, begin = settled(server, 0, MODEL), time.perf_counter()
    with ThreadPoolExecutor(5) as pool:
        jobs = [pool.submit(measure, server, f"{i} wizards brew " * (i + 1), 8 + 6 * i, MODEL) for i in range(5)]
        measured: list[Measured] = [job.result() for job in jobs]
    after = settled(server, ended(before, MODEL) + 5, MODEL)
    span = time.perf_counter() - begin

    checked: set[str] = set()

    def grown(name: str) -> tuple[float, float]:
        checked.add(name)
        (count, total), (old_count, old_total) = after.histogram(name, MODEL), before.histogram(name, MODEL)
        return count - old_count, total - old_total

    count, num_tokens = len(measured), sum(m.num_output_tokens for m in measured)
    num_prompt_tokens = sum(m.num_prompt_tokens for m in measured)
    first_seen, last_seen = sum(m.times[0] for m in measured), sum(m.times[-1] for m in measured)
    parts = {name: grown(f"cb_request_{name}_time_seconds") for name in ("queue", "prefill", "decode")}
    first_token, whole = grown("cb_time_to_first_token_seconds"), grown("cb_e2e_request_latency_seconds")
    between = grown("cb_inter_token_latency_seconds")
    assert {first_token[0], whole[0], *(part[0] for part in parts.values())} == {count}
    assert all(seconds >= 0 for _, seconds in parts.values())
    assert parts["queue"][1] > 0, "three of the five waited for a slot"
    assert 0 < parts["queue"][1] + parts["prefill"][1] <= first_token[1] <= first_seen
    assert sum(seconds for _, seconds in parts.values()) <= whole[1] <= last_seen
    assert first_token[1] < whole[1]
    assert between == (num_tokens - count, about(parts["decode"][1]))

    assert grown("cb_request_prompt_tokens") == (count, about(num_prompt_tokens))
    assert grown("cb_request_output_tokens") == (count, about(num_tokens))
    num_steps, step_seconds = grown("cb_step_seconds")
    assert num_steps == after.value("cb_steps_total", model=MODEL) - before.value("cb_steps_total", model=MODEL)
    assert max(m.num_output_tokens for m in measured) <= num_steps <= num_tokens
    assert 0 < step_seconds <= span, "steps do not overlap"
    assert grown("cb_step_requests") == (num_steps, about(num_tokens)), "a row for each token"
    cached = after.value("cb_cached_prompt_tokens_total", model=MODEL)
    cached -= before.value("cb_cached_prompt_tokens_total", model=MODEL)
    assert grown("cb_step_tokens") == (num_steps, about(num_prompt_tokens - cached + num_tokens - count))

    assert grown("vllm:time_to_first_token_seconds") == first_token
    assert grown("vllm:e2e_request_latency_seconds") == whole
    assert grown("vllm:time_per_output_token_seconds") == (between[0], about(between[1]))
    assert grown("vllm:request_prompt_tokens") == (count, about(num_prompt_tokens))
    assert grown("vllm:request_generation_tokens") == (count, about(num_tokens))
    assert grown("vllm:request_params_n") == (count, count)
    ours = {name for name in exported(after, "histogram") if name.startswith(("cb_", "vllm:", "nv_trt_llm_"))}
    assert ours - checked == set()


def test_every_gauge_while_clients_hold_streams_open_and_after(server: RunningServer) -> None:
    """Two streams run and one waits, as its clients know; blocks lie between what they have got and what is yet to
    come. When all have left, everything is back."""
    before = settled(server, 0, MODEL)
    streams = [Open() for _ in range(NUM_SLOTS + NUM_WAITING)]
    with ThreadPoolExecutor(len(streams)) as pool:
        jobs = [pool.submit(one.read, server, f"the quick brown fox {i}") for i, one in enumerate(streams)]
        try:

            def is_full() -> bool:
                now = Snapshot(server)
                running = now.value("cb_requests_running", model=MODEL)
                return running == NUM_SLOTS and now.value("cb_requests_waiting", model=MODEL) == NUM_WAITING

            eventually(is_full, "two run and one waits")
            eventually(lambda: sum(one.num_output_tokens > 50 for one in streams) == NUM_SLOTS, "50 tokens")
            held = [one.num_prompt_tokens + one.num_output_tokens for one in streams if one.num_output_tokens]
            least_blocks = sum(-(-num_tokens // BLOCK_SIZE) for num_tokens in held)
            eventually(lambda: Reading(server).blocks("used") >= least_blocks, "these tokens have blocks")
            most = sum(one.num_prompt_tokens + ENDLESS for one in streams if one.num_output_tokens)
            bounds = (least_blocks, most // BLOCK_SIZE + NUM_SLOTS)
            check_gauges(agreeing(server), NUM_SLOTS, NUM_WAITING, *bounds)
        finally:
            for one in streams:
                one.is_closed.set()
        for job in jobs:
            job.result()
    settled(server, ended(before, MODEL) + len(streams), MODEL)
    check_gauges(Reading(server), 0, 0, 0, 0)


class Reading(Snapshot):
    """Notes which gauges were asked for."""

    def __init__(self, server: RunningServer) -> None:
        super().__init__(server)
        self.checked: set[str] = set()

    def gauge(self, name: str, label: str = "", kind: str = "", **labels: str) -> float:
        self.checked.add(f"{name} {kind}".rstrip())
        return self.value(name, model=MODEL, **({label: kind} if label else {}), **labels)

    def requests(self, kind: str) -> float:
        return self.gauge("nv_trt_llm_request_metrics", "request_type", kind)

    def blocks(self, kind: str) -> float:
        return self.gauge("nv_trt_llm_kv_cache_block_metrics", "kv_cache_block_type", kind)


def agreeing(server: RunningServer) -> Reading:
    """A reading that was not taken while the gauges were being set, which is done one after the other: the first of
    them and the last agree."""
    readings: list[Reading] = []

    def do_agree() -> bool:
        now = Reading(server)
        readings.append(now)
        free, usage = now.blocks("free"), now.gauge("vllm:kv_cache_usage_perc")
        return 1 - free / now.blocks("max") == pytest.approx(usage)

    eventually(do_agree, "the gauges agree")
    return readings[-1]


def check_gauges(now: Reading, running: int, waiting: int, least_blocks: int, most_blocks: int) -> None:
    for prefix in ("cb_requests_", "vllm:num_requests_"):
        assert (now.gauge(f"{prefix}running"), now.gauge(f"{prefix}waiting")) == (running, waiting)
    assert (now.requests("scheduled"), now.requests("waiting")) == (running, waiting)
    assert (now.requests("active"), now.requests("max")) == (running + waiting, NUM_SLOTS)
    assert now.gauge("cb_requests_swapped") == 0, "nobody was preempted"
    assert now.gauge("cb_engine_up") == 1
    num_blocks, used = now.blocks("max"), now.blocks("used")
    assert now.blocks("free") == num_blocks - used
    assert least_blocks <= used <= most_blocks
    for usage in (now.blocks("fraction"), now.gauge("cb_kv_cache_usage"), now.gauge("vllm:kv_cache_usage_perc")):
        assert usage == pytest.approx(used / num_blocks)
    assert now.blocks("tokens_per") == BLOCK_SIZE
    assert now.gauge("cb_kv_cache_tokens") == num_blocks * BLOCK_SIZE, "its layers are one group"
    sizes = {"block_size": str(BLOCK_SIZE), "num_gpu_blocks": str(int(num_blocks))}
    assert now.gauge("vllm:cache_config_info", **sizes) == 1
    ours = {name for name in exported(now, "gauge") if name.startswith(("cb_", "vllm:", "nv_trt_llm_"))}
    assert ours - now.checked == set()
