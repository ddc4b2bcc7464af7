"""What fewer places on the device than adapters (`max_loras`) leave of the throughput: a simulation; no GPU.

    python kernels/adapter_places.py [--places 4,8,16,32] [--streams 64] [--names 32] [--zipf 1] [--requests 1500]

The real engine loop and scheduler under a virtual clock (`cb_backend.study.simulator`). Each of the streams asks again
as soon as it is answered, for a name drawn by Zipf's law, and has an answer of `--output-len` tokens. A step takes
`--step-ms`, `--row-us` for each row and `--prompt-ms` for each prompt: as measured on an H200 with Llama-3.1-8B, 512
tokens in, without adapters. Adapters make all of these longer by `--cost`, and a load takes `--load-ms`.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cb_backend.contracts.config import EngineConfig
from cb_backend.contracts.token_rules import TokenRules
from cb_backend.engine.adapter_wait import take_adapter
from cb_backend.study.adapter_mix import AdapterMix
from cb_backend.study.simulator import VirtualClock, simulated_engine
from cb_backend.study.step_times import Law, StepTimes

VOCAB_SIZE, BLOCK_SIZE, NUM_BLOCKS = 32_000, 16, 60_000
SIZES = 20  # of steps, in powers of two: all of one level
WARM_UP = 5  # one part of the requests in so many is not counted


@dataclass(frozen=True, slots=True)
class Load:
    """Streams, and what they ask for."""

    streams: int
    input_len: int
    output_len: int
    requests: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of the requests after the first ones."""

    tokens_per_s: float
    first_token_s: list[float]  # since the arrival, sorted
    num_loads: int  # of adapters; all

    def percentile(self, percent: int) -> float:
        return self.first_token_s[len(self.first_token_s) * percent // 100]


def step_times(step_s: float, row_s: float, prompt_s: float, input_len: int) -> StepTimes:
    levels = [step_s] * SIZES
    return StepTimes(
        conditions={}, model="", dtype="bfloat16", device="cuda", run_ahead=1, max_model_len=8192,
        vocab_size=VOCAB_SIZE, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, max_num_seqs=256,
        max_num_batched_tokens=2048, num_steps=0, relative_error=0.0, decode=Law(levels, [row_s, 0.0, 0.0, 0.0, 0.0]),
        mixed=Law(levels, [row_s, 0.0, prompt_s / input_len, 0.0, 0.0]),
    )  # fmt: skip


def simulate(load: Load, times: StepTimes, mix: AdapterMix | None) -> Outcome:
    """Requests are the same whatever `times` are, and through `mix` if there is one."""
    config = EngineConfig(model="simulated", max_num_seqs=256, max_num_batched_tokens=2048, enable_lora=mix is not None)
    clock = VirtualClock()
    engine = simulated_engine(config, times, clock, adapters=mix)
    names = [] if mix is None else mix.draw(load.requests)
    prompts = np.random.default_rng(0)
    arrived: list[float] = []
    first_token: dict[int, float] = {}

    def ask() -> None:
        number = len(arrived)
        tokens = prompts.integers(0, VOCAB_SIZE, load.input_len, dtype=np.int32)
        rules = TokenRules(max_tokens=load.output_len, temperature=0.0, ignore_eos=True, seed=number)
        request = engine.make_request(number, tokens, rules)
        if names:
            take_adapter(request, names[number])
        arrived.append(clock())
        engine.add_request(request)

    for _ in range(min(load.streams, load.requests)):
        ask()
    num_ended, num_tokens, started_at = 0, 0, 0.0
    while engine.has_unfinished():
        output = engine.step()
        if output is None:
            continue
        for number in output.request_ids.tolist():
            first_token.setdefault(number, clock())
        if num_ended >= load.requests // WARM_UP:
            num_tokens += len(output.request_ids)
        for _ in range(int(np.count_nonzero(output.finish_reasons))):
            num_ended += 1
            if num_ended == load.requests // WARM_UP:
                started_at = clock()
            if len(arrived) < load.requests:
                ask()
        if len(arrived) == load.requests:
            break  # from here on streams are fewer
    counted = sorted(first_token[number] - arrived[number] for number in first_token if arrived[number] >= started_at)
    stats = engine.stats().adapters
    return Outcome(num_tokens / (clock() - started_at), counted, 0 if stats is None else stats.num_loads)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--places", default="4,8,16,32")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--names", type=int, default=32)
    parser.add_argument("--zipf", type=float, default=1.0)
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--step-ms", type=float, default=4.2)
    parser.add_argument("--row-us", type=float, default=24.5)
    parser.add_argument("--prompt-ms", type=float, default=12.5)
    parser.add_argument("--cost", type=float, default=0.11, help="what adapters add to steps and prompts")
    parser.add_argument("--load-ms", type=float, default=1.6)
    given = parser.parse_args()
    load = Load(given.streams, given.input_len, given.output_len, given.requests)

    def times(cost: float) -> StepTimes:
        step_s, row_s = 1e-3 * given.step_ms * (1 + cost), 1e-6 * given.row_us * (1 + cost)
        return step_times(step_s, row_s, 1e-3 * given.prompt_ms * (1 + cost), load.input_len)

    base = simulate(load, times(0.0), None)
    print(f"{given.streams} streams, {given.names} names; without adapters {base.tokens_per_s:,.0f} output tokens/s")
    print("places  tokens/s  share  first token p50/p99/longest s    loads")
    for places in map(int, given.places.split(",")):
        mix = AdapterMix(given.names, given.zipf, places, given.load_ms, 1e3)  # so many milliseconds a load
        found = simulate(load, times(given.cost), mix)
        waits = f"{found.percentile(50):.2f} / {found.percentile(99):.2f} / {found.first_token_s[-1]:.2f}"
        share = found.tokens_per_s / base.tokens_per_s
        print(f"{places:6}  {found.tokens_per_s:8,.0f}  {share:5.0%}  {waits:>28}  {found.num_loads:7,}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
