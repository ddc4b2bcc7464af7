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
from cb_backend.engine.llm_engine import LLMEngine
from cb_backend.study.adapter_mix import AdapterMix
from cb_backend.study.simulator import VirtualClock, simulated_engine
from cb_backend.study.step_times import Law, StepTimes

VOCAB_SIZE, BLOCK_SIZE, NUM_BLOCKS = 32_000, 16, 60_000
MAX_MODEL_LEN = 8192
SIZES = 20  # of steps, in powers of two: all of one level
WARM_UP = 5  # one part of the requests in so many is not counted


@dataclass(frozen=True, slots=True)
class Load:
    """Streams, and what they ask for."""

    streams: int
    input_len: int
    output_len: int
    requests: int  # of which there are figures; streams go on until all of them have a first token


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of the requests after the first ones."""

    tokens_per_s: float  # until the last of them has come
    first_token_s: list[float]  # since the arrival, sorted
    num_loads: int  # of adapters; all

    def percentile(self, percent: int) -> float:
        return self.first_token_s[len(self.first_token_s) * percent // 100]


def step_times(step_s: float, row_s: float, prompt_s: float, input_len: int) -> StepTimes:
    levels = [step_s] * SIZES
    return StepTimes(
        conditions={}, model="", dtype="bfloat16", device="cuda", run_ahead=1, max_model_len=MAX_MODEL_LEN,
        vocab_size=VOCAB_SIZE, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, max_num_seqs=256,
        max_num_batched_tokens=2048, num_steps=0, relative_error=0.0, decode=Law(levels, [row_s, 0.0, 0.0, 0.0, 0.0]),
        mixed=Law(levels, [row_s, 0.0, prompt_s / input_len, 0.0, 0.0]),
    )  # fmt: skip


class Streams:
    """Ask again whenever one is answered, for the same requests whatever else is simulated."""

    def __init__(self, engine: LLMEngine, clock: VirtualClock, load: Load, mix: AdapterMix | None) -> None:
        self._engine, self._clock, self._load = engine, clock, load
        self._prompts = np.random.default_rng(0)
        self._names = [] if mix is None else mix.draw(2 * load.requests)
        self.arrived: list[float] = []
        self.first_token: dict[int, float] = {}
        for _ in range(load.streams):
            self.ask()

    def ask(self) -> None:
        number = len(self.arrived)
        tokens = self._prompts.integers(0, VOCAB_SIZE, self._load.input_len, dtype=np.int32)
        rules = TokenRules(max_tokens=self._load.output_len, temperature=0.0, ignore_eos=True, seed=number)
        request = self._engine.make_request(number, tokens, rules)
        if self._names:
            take_adapter(request, self._names[number % len(self._names)])
        self.arrived.append(self._clock())
        self._engine.add_request(request)

    def step(self) -> int:
        """One step of the engine; the tokens that it gives."""
        output = self._engine.step()
        if output is None:
            return 0
        for number in output.request_ids.tolist():
            self.first_token.setdefault(number, self._clock())
        for _ in range(int(np.count_nonzero(output.finish_reasons))):
            self.ask()
        return len(output.request_ids)


def simulate(load: Load, times: StepTimes, mix: AdapterMix | None) -> Outcome:
    """Of requests through `mix`, if there is one."""
    config = EngineConfig(model="simulated", max_num_seqs=256, max_num_batched_tokens=2048, enable_lora=mix is not None)
    clock = VirtualClock()
    engine = simulated_engine(config, times, clock, adapters=mix)
    streams = Streams(engine, clock, load, mix)
    first = load.streams + (load.requests - load.streams) // WARM_UP
    while len(streams.arrived) < first:
        streams.step()
    start, num_tokens = clock(), 0
    while len(streams.arrived) < load.requests:
        num_tokens += streams.step()
    seconds = clock() - start
    counted = range(first, load.requests)
    while not all(number in streams.first_token for number in counted):
        streams.step()
    waits = sorted(streams.first_token[number] - streams.arrived[number] for number in counted)
    stats = engine.stats().adapters
    return Outcome(num_tokens / seconds, waits, 0 if stats is None else stats.num_loads)


def arguments() -> argparse.Namespace:
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
    try:
        given.places = [int(part) for part in given.places.split(",")]
    except ValueError:
        parser.error(f"--places {given.places}: numbers with commas between them, such as 4,8")
    least = {"streams": 1, "names": 1, "input_len": 1, "output_len": 2, "requests": 2 * given.streams + WARM_UP}
    for name, value in least.items():
        if getattr(given, name) < value:
            parser.error(f"--{name.replace('_', '-')} {getattr(given, name)}: at least {value}")
    if min(given.places) < 1:
        parser.error(f"--places {min(given.places)}: at least 1")
    if given.input_len + given.output_len > MAX_MODEL_LEN or given.streams > 4096:
        parser.error(f"requests have up to {MAX_MODEL_LEN} tokens, and streams are up to 4096")
    for name in ("zipf", "row_us", "prompt_ms", "cost"):
        if not 0 <= getattr(given, name) < float("inf"):
            parser.error(f"--{name.replace('_', '-')} {getattr(given, name)}: 0 or more")
    for name in ("step_ms", "load_ms"):
        if not 0 < getattr(given, name) < float("inf"):
            parser.error(f"--{name.replace('_', '-')} {getattr(given, name)}: more than 0")
    return given


def main() -> int:
    given = arguments()
    load = Load(given.streams, given.input_len, given.output_len, given.requests)

    def times(cost: float) -> StepTimes:
        step_s, row_s = 1e-3 * given.step_ms * (1 + cost), 1e-6 * given.row_us * (1 + cost)
        return step_times(step_s, row_s, 1e-3 * given.prompt_ms * (1 + cost), load.input_len)

    base = simulate(load, times(0.0), None)
    print(f"{given.streams} streams, {given.names} names; without adapters {base.tokens_per_s:,.0f} output tokens/s")
    print("places  tokens/s  share  first token p50/p99/longest s    loads")
    for places in given.places:
        mix = AdapterMix(given.names, given.zipf, places, given.load_ms, 1e3)  # so many milliseconds a load
        found = simulate(load, times(given.cost), mix)
        waits = f"{found.percentile(50):.2f} / {found.percentile(99):.2f} / {found.first_token_s[-1]:.2f}"
        share = found.tokens_per_s / base.tokens_per_s
        print(f"{places:6}  {found.tokens_per_s:8,.0f}  {share:5.0%}  {waits:>28}  {found.num_loads:7,}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
