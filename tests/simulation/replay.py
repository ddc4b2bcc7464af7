"""A trace of real requests through the real engine loop, without a device: what is preempted, refused and waited for.

python -m tests.simulation.replay --trace AzureLLMInferenceTrace_conv.csv --blocks 2000 --set admission_reserve=0.5

Time is virtual; a step takes what a formula says, by default about that of an 8B model in bf16 on one H100. Requests
ask for at most `--max-tokens` tokens and end after as many as the trace says. `--load` squeezes the times of arrival.
Prints, asserts nothing.
"""

from __future__ import annotations

import argparse
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cb_backend.config import EngineConfig, engine_config_from_dict
from cb_backend.engine.llm_engine import LLMEngine
from cb_backend.errors import UnavailableError
from cb_backend.messages import ModelInfo
from cb_backend.outputs import NO_TOKEN, ModelRunnerOutput, SchedulerOutput
from cb_backend.sampling_params import SamplingParams
from cb_backend.scheduling_params import SchedulingParams
from cb_backend.study.simulator import VirtualClock
from cb_backend.traffic.traces import TraceRow, read_trace

_STOP, _OTHER = 1, 2
_VOCAB_SIZE = 1 << 20


@dataclass(frozen=True)
class StepCost:
    """Seconds of a step: see the README's figures for an 8B model."""

    fixed: float = 5.6e-3
    token: float = 22e-6
    decode_pair: float = 40e-9  # a decoded token reads one token of its context
    prefill_pair: float = 1e-9

    def seconds(self, plan: SchedulerOutput) -> float:
        n, computed, scheduled = plan.num_decode_rows, plan.num_computed_tokens, plan.num_scheduled_tokens
        pairs = float(np.dot(scheduled[n:].astype(float), computed[n:] + scheduled[n:] / 2))
        decode_pairs = float(computed[:n].sum(dtype=np.int64))
        return self.fixed + self.token * plan.num_tokens + self.decode_pair * decode_pairs + self.prefill_pair * pairs


@dataclass
class _Launched:
    clock: VirtualClock
    end: float
    output: ModelRunnerOutput

    def result(self) -> ModelRunnerOutput:
        self.clock.advance_to(self.end)
        return self.output


@dataclass
class LengthRunner:
    """Ends each request after its number of output tokens. Steps come one after the other, as on a device."""

    clock: VirtualClock
    output_lens: NDArray[np.int32]
    cost: StepCost
    num_slots: int
    free_at: float = 0.0
    totals: NDArray[np.int32] = field(init=False)  # by slot: prompt + output tokens

    def __post_init__(self) -> None:
        self.totals = np.zeros(self.num_slots, np.int32)

    def execute_model(self, plan: SchedulerOutput) -> _Launched:
        for row in plan.joined:
            self.totals[row.slot] = row.num_prompt_tokens + self.output_lens[row.request_id]
        num_after = plan.num_computed_tokens + plan.num_scheduled_tokens + 1
        sampled = np.where(num_after >= self.totals[plan.slots], _STOP, _OTHER).astype(np.int32)
        sampled[~plan.is_sampling] = NO_TOKEN
        self.free_at = max(self.free_at, self.clock.now) + self.cost.seconds(plan)
        output = ModelRunnerOutput(plan.step_id, sampled, np.zeros(plan.num_rows, np.bool_))
        return _Launched(self.clock, self.free_at, output)

    def prefix_cache_key(self, num_prompt_tokens: int) -> bytes:
        return b""

    def close(self) -> None:
        pass


@dataclass
class Replay:
    """What a trace met. Arrays are over its requests."""

    first: NDArray[np.float64]  # seconds from arrival to the first token; nan: refused
    num_preemptions: NDArray[np.int32]
    gaps: NDArray[np.float64]  # seconds between two tokens of a request, all of them
    num_refused: int
    num_output_tokens: int
    seconds: float
    mean_running: float
    mean_usage: float  # share of the blocks that are held

    @property
    def preempted_share(self) -> float:
        return float((self.num_preemptions > 0).mean())

    def table(self) -> str:
        ttft, gaps = self.first[~np.isnan(self.first)] * 1000, self.gaps * 1000
        return (
            f"{len(self.first)} requests, {self.num_refused} refused, {self.preempted_share:.2%} preempted "
            f"({int(self.num_preemptions.sum())} times, at most {int(self.num_preemptions.max(initial=0))})\n"
            f"first token ms: p50 {np.percentile(ttft, 50):,.0f}, p90 {np.percentile(ttft, 90):,.0f}, "
            f"p99 {np.percentile(ttft, 99):,.0f}; between tokens ms: p50 {np.percentile(gaps, 50):.1f}, "
            f"p99 {np.percentile(gaps, 99):.1f}, max {gaps.max():.0f}\n"
            f"{self.num_output_tokens / self.seconds:,.0f} output tokens/s over {self.seconds:,.0f} s; on average "
            f"{self.mean_running:.1f} running, {self.mean_usage:.0%} of the blocks held"
        )


def replay(
    rows: list[TraceRow],
    load: float,
    max_tokens: int,
    num_blocks: int,
    arguments: dict[str, Any],
    cost: StepCost | None = None,
) -> Replay:
    """Run a trace to its end, `load` times as fast as it was. A request's output is cut at `max_tokens`."""
    config = engine_config_from_dict({"model": "replay", "run_ahead": 2, **arguments})
    clock, count = VirtualClock(), len(rows)
    arrivals = [(row.arrival_s or 0.0) / load for row in rows]
    lengths = np.array([min(row.num_output_tokens, max_tokens) for row in rows], np.int32)
    runner = LengthRunner(clock, lengths, cost or StepCost(), config.max_num_seqs)
    engine = LLMEngine(config, runner, _info(config, num_blocks), clock)
    due = deque(range(count))
    first, last, gaps = np.full(count, np.nan), np.full(count, np.nan), []
    requests, refused, steps, running, usage = {}, 0, 0, 0, 0.0
    while due or engine.has_unfinished():
        if not engine.has_unfinished():
            clock.advance_to(arrivals[due[0]])
        while due and arrivals[due[0]] <= clock.now:
            number = due.popleft()
            prompt = np.full(rows[number].num_prompt_tokens, 3 + number, np.int32)
            params = SamplingParams(max_tokens=max_tokens, stop_token_ids=(_STOP,), seed=1)
            try:
                request = engine.make_request(number, prompt, params, SchedulingParams())
                engine.add_request(request)
                requests[number] = request
            except UnavailableError:
                refused += 1
        output = engine.step()
        if output is None:
            continue
        ids = output.request_ids[output.token_ids != NO_TOKEN]
        is_first = np.isnan(first[ids])
        first[ids[is_first]] = clock.now
        gaps.append(clock.now - last[ids[~is_first]])
        last[ids] = clock.now
        steps, running = steps + 1, running + engine.scheduler.num_running
        usage += 1 - engine.scheduler.num_free_blocks / num_blocks
    counts = np.zeros(count, np.int32)
    for number, request in requests.items():
        counts[number] = request.num_preemptions
    return Replay(
        first - np.array(arrivals), counts, np.concatenate(gaps), refused, engine.stats().num_output_tokens, clock.now,
        running / steps, usage / steps,
    )  # fmt: skip


def _info(config: EngineConfig, num_blocks: int) -> ModelInfo:
    return ModelInfo(
        model="replay", tokenizer_dir="", vocab_size=_VOCAB_SIZE, max_model_len=config.max_model_len or 16384,
        eos_token_ids=(), block_size=config.block_size, num_blocks=num_blocks, max_num_seqs=config.max_num_seqs,
        dtype="bfloat16", device="cuda",
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--trace", type=Path, required=True, help="a CSV of the Azure LLM inference trace 2023, or another"
    )
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--blocks", type=int, nargs="+", default=[2000], help="KV blocks of 16 tokens")
    parser.add_argument("--max-tokens", type=int, nargs="+", default=[1024], help="what every request asks for")
    parser.add_argument("--load", type=float, nargs="+", default=[1.0], help="times as many requests a second")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="engine arguments")
    options = parser.parse_args()
    arguments = dict(item.split("=", 1) for item in options.set)
    rows = read_trace(options.trace, limit=options.requests)
    for blocks in options.blocks:
        for max_tokens in options.max_tokens:
            for load in options.load:
                found = replay(rows, load, max_tokens, blocks, arguments)
                print(f"--- {options.trace.stem}, {blocks} blocks, max_tokens {max_tokens}, load {load:g}, {arguments}")
                print(found.table(), flush=True)


if __name__ == "__main__":
    main()
