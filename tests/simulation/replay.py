"""A trace of real requests through the capacity simulator: how many are preempted, and what admission settings cost.

python -m tests.simulation.replay --trace AzureLLMInferenceTrace_conv.csv --blocks 1000 2500 --load 3
python -m tests.simulation.replay --trace AzureLLMInferenceTrace_code.csv --set max_itl_ms=20 prefill_policy=hybrid

Steps take what a formula says, about an 8B model in bf16 on one H100, or what `--times` (of `cb-backend study`) says.
Requests ask for at most `--max-tokens` tokens and end after as many as the trace says; prompts have nothing in common.
`--load` squeezes the times of arrival. Prints, asserts nothing; a refused request ends it with the reason.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cb_backend.contracts.config import engine_config_from_dict
from cb_backend.study.replay import Replay, replay
from cb_backend.study.simulator import VirtualClock, simulated_engine
from cb_backend.study.step_times import StepTimes
from cb_backend.study.traffic import Traffic
from cb_backend.traffic.traces import TraceRow, read_trace


@dataclass(frozen=True)
class FormulaTimes:
    """Stands for `StepTimes`: 5.6 ms for the weights, 22 us a token, 40 ns a token of a stream's context."""

    model: str = "formula-8b"
    dtype: str = "bfloat16"
    device: str = "cuda"
    vocab_size: int = 1 << 17
    max_model_len: int = 16384
    block_size: int = 16
    num_blocks: int = 27_000
    kv_windows: tuple[int, ...] = (0,)

    def seconds(self, shape: tuple[float, ...]) -> float:
        rows, context, prompt_tokens, pairs, _ = shape
        return 5.6e-3 + 22e-6 * (rows + prompt_tokens) + 40e-9 * context + 1e-9 * pairs


def run_trace(
    rows: list[TraceRow],
    load: float,
    max_tokens: int,
    num_blocks: int,
    arguments: dict[str, Any],
    times: StepTimes | FormulaTimes,
) -> Replay:
    config = engine_config_from_dict(
        {"model": "replay", "run_ahead": 2, "num_gpu_blocks_override": num_blocks, **arguments}
    )
    clock = VirtualClock()
    traffic = Traffic(
        [np.full(row.num_prompt_tokens, 3 + number, np.int32) for number, row in enumerate(rows)],
        [min(row.num_output_tokens, max_tokens) for row in rows],
        [max_tokens] * len(rows),
        [(row.arrival_s or 0.0) / load for row in rows],
    )
    return replay(simulated_engine(config, times, clock), traffic, clock, clock.sleep)  # type: ignore[arg-type]


def table(found: Replay) -> str:
    ttft, gaps = found.latencies.ttft * 1000, found.latencies.token_gaps * 1000
    usage = 1 - float(found.steps.num_free_blocks.mean()) / found.num_blocks
    return (
        f"{found.num_requests} requests, {found.num_preemptions} preemptions "
        f"({found.num_preemptions / found.num_requests:.2%}), {usage:.0%} of the blocks held, "
        f"{found.num_output_tokens / found.seconds:,.0f} output tokens/s over {found.seconds:,.0f} s\n"
        f"first token ms: p50 {np.percentile(ttft, 50):,.0f}, p90 {np.percentile(ttft, 90):,.0f}, "
        f"p99 {np.percentile(ttft, 99):,.0f}; between tokens ms: p50 {np.percentile(gaps, 50):.1f}, "
        f"p99 {np.percentile(gaps, 99):.1f}, max {gaps.max():.0f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True, help="a CSV of the Azure LLM inference trace, or another")
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--blocks", type=int, nargs="+", default=[4000], help="KV blocks of 16 tokens")
    parser.add_argument("--max-tokens", type=int, default=2048, help="what every request asks for")
    parser.add_argument("--load", type=float, nargs="+", default=[1.0], help="times as many requests a second")
    parser.add_argument("--times", type=Path, help="measured step times instead of the formula")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="engine arguments")
    options = parser.parse_args()
    arguments = dict(item.split("=", 1) for item in options.set)
    times = FormulaTimes() if options.times is None else StepTimes.load(options.times)
    rows = read_trace(options.trace, limit=options.requests)
    for blocks in options.blocks:
        for load in options.load:
            print(f"--- {options.trace.stem}, {blocks} blocks, load {load:g}, {arguments or 'default settings'}")
            print(table(run_trace(rows, load, options.max_tokens, blocks, arguments, times)), flush=True)


if __name__ == "__main__":
    main()
