"""What adapters cost beside decode steps that use them (`bench_step.py --adapters`).

    python kernels/bench_adapters.py prompts [--model llama-3.1-8b] [--tokens 2048] [--adapters 8]
    python kernels/bench_adapters.py base [--rows 1,64,256]
    python kernels/bench_adapters.py swap --model DIR --load-format dummy

`prompts`: a captured step of so many tokens, a prompt for each adapter, without adapters and through them. `base`:
steps whose rows use none, in a model with room for adapters between two without it, and whether they launch the same
kernels. `swap`: what running streams wait for a token while every 100 ms a short request arrives: through no adapter,
through one that stays on the device, one that comes from host memory each time, one from its files each time.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cb_backend.cli.benchmarks.made_up_adapters import write_adapters
from cb_backend.contracts.adapters import AdapterSource
from cb_backend.contracts.config import engine_config_from_dict
from cb_backend.contracts.request import Request
from cb_backend.contracts.token_rules import TokenRules
from cb_backend.engine.llm_engine import LLMEngine, create_engine
from cb_backend.study.machine import conditions
from cb_backend.study.replay import fresh_engine, no_collections
from cb_backend.support.adapter_files import folder_stamp

if TYPE_CHECKING:
    from cb_backend.engine.runner.slot_runner import SlotRunner
    from cb_backend.engine.runner.step_buffers import StepBuffers

NUM_SLOTS = 2  # of adapters, in `swap`: one of those that come in turn has left again when it is wanted
NUM_FOLDERS = 6
MAX_MODEL_LEN = 2048
STREAM_TOKENS = 64  # of a stream's prompt; its answer has room for the rest
PERIOD_S = 0.1
TURNS = 7


def prompts(arguments: argparse.Namespace) -> None:
    from bench_step import make_model, make_runner, with_room_for
    from tune_lora import new_prompt_step

    count = arguments.adapters
    lengths = [arguments.tokens // count] * count
    model = make_model(arguments.model, count)
    runner = with_room_for(make_runner(model, lengths), count)
    base, adapted = alternating(runner, lengths, [new_prompt_step(runner, lengths, each) for each in (0, count)])
    print(
        f"{arguments.model}: {sum(lengths)} tokens of {count} prompts: {1e3 * base:.3f} ms without adapters,"
        f" {1e3 * adapted:.3f} through {count}, {adapted / base - 1:+.1%}"
    )


def alternating(runner: SlotRunner, lengths: list[int], steps: list[StepBuffers]) -> list[float]:
    """Seconds of each step, the median of turns in which all are timed."""
    from bench_step import record, seat, time_step

    from cb_backend.kernels.compile_ahead import compile_ahead

    graphs = []
    for buffers in steps:
        compile_ahead(lambda buffers=buffers: runner.run_step(buffers))  # type: ignore[misc]
        graphs.append(record(runner, buffers))
    times: list[list[float]] = [[] for _ in steps]
    for _ in range(TURNS):
        for graph, found in zip(graphs, times, strict=True):
            seat(runner, lengths)
            found.append(time_step(graph, 3))
    return [statistics.median(found) for found in times]


def base(arguments: argparse.Namespace) -> None:
    from bench_step import capture, make_model, make_runner, seat, time_step

    rows = [int(number) for number in arguments.rows.split(",")]
    found: list[dict[int, tuple[float, Counter[str]]]] = []
    for count in (0, arguments.adapters, 0):
        model, of_rows = make_model(arguments.model, count), {}
        for num_rows in rows:
            lengths = [arguments.context] * num_rows
            runner = make_runner(model, lengths)
            graph, buffers = capture(runner, num_rows)  # a graph does not keep its buffers
            times = []
            for _ in range(TURNS):
                seat(runner, lengths)
                times.append(time_step(graph))
            of_rows[num_rows] = statistics.median(times), kernels_of(graph)
            del graph, buffers
            runner.close()
            del runner
            torch.cuda.empty_cache()
        found.append(of_rows)
        del model
        torch.cuda.empty_cache()
    for num_rows in rows:
        before, enabled, after = (each[num_rows] for each in found)
        kernels = "the same kernels" if before[1] == enabled[1] == after[1] else "OTHER KERNELS"
        of_both = (before[0] + after[0]) / 2
        print(
            f"{arguments.model} rows {num_rows:4} context {arguments.context}: without {1e3 * before[0]:.3f},"
            f" enabled {1e3 * enabled[0]:.3f}, without {1e3 * after[0]:.3f} ms: {enabled[0] / of_both - 1:+.2%},"
            f" {kernels}"
        )


def kernels_of(graph: torch.cuda.CUDAGraph) -> Counter[str]:
    """How often each is launched in a replay."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        graph.replay()
        torch.cuda.synchronize()
    return Counter({event.key: event.count for event in profiler.key_averages()})


def swap(arguments: argparse.Namespace) -> None:
    loaded = create_engine(
        engine_config_from_dict(
            {
                "model": str(arguments.model), "load_format": arguments.load_format, "max_model_len": MAX_MODEL_LEN,
                "enable_lora": True, "max_loras": NUM_SLOTS, "max_lora_rank": 16,
            }
        )
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="adapters-") as folder:
        table = loaded.runner.adapters.table.whole  # type: ignore[attr-defined]
        sources = [source_of(path) for path in write_adapters(Path(folder), table, NUM_FOLDERS)]
        for name, used, kept in (
            ("no adapter", [None], NUM_FOLDERS),
            ("one that stays", sources[:1], NUM_FOLDERS),
            ("from host memory", sources, NUM_FOLDERS),
            ("from files", sources, NUM_SLOTS),
        ):
            engine = fresh_engine(loaded, max_cpu_loras=kept)
            if used[0] is not None and kept == NUM_FOLDERS:
                run_streams(engine, arguments, used, num_streams=1, seconds=1.5)  # all are in host memory afterwards
            before = counts_of(engine)
            gaps, answered = run_streams(engine, arguments, used, arguments.streams, arguments.seconds)
            num_loads, num_reads = (now - then for now, then in zip(counts_of(engine), before, strict=True))
            p50, p99 = np.percentile(gaps, (50, 99))
            print(
                f"{name:17} {len(gaps):6} gaps of {arguments.streams} streams: p50 {p50:.2f}, p99 {p99:.2f}, longest"
                f" {gaps.max():.2f} ms; requests beside them answered in {np.median(answered):.1f} ms, longest"
                f" {max(answered):.1f}; {num_loads} loads to the device, {num_reads} reads of files",
                flush=True,
            )
    loaded.close()


def source_of(path: Path) -> AdapterSource:
    stamp = folder_stamp(path)
    assert stamp is not None, f"{path} holds no adapter"
    return stamp.source(path.name, str(path), is_settled=True)


def counts_of(engine: LLMEngine) -> tuple[int, int]:
    """Adapters that were loaded to the device, and that were read from files, so far."""
    stats = engine.stats().adapters
    assert stats is not None, "the engine takes adapters"
    return stats.num_loads, stats.num_reads


def run_streams(
    engine: LLMEngine,
    arguments: argparse.Namespace,
    used: Sequence[AdapterSource | None],
    num_streams: int,
    seconds: float,
) -> tuple[np.ndarray, list[float]]:
    """Milliseconds: gaps between tokens of the streams while the others arrive, and what those wait for their only
    token."""
    others = list(itertools.islice(itertools.cycle(used), int(seconds / PERIOD_S)))
    arrivals = [0.0] * num_streams + [1.0 + PERIOD_S * index for index in range(len(others))]
    draw = np.random.default_rng(len(arrivals))
    first_id = engine.log.num_steps  # of this call: ids are not used twice

    def make_request(index: int) -> Request:
        is_stream = index < num_streams
        params = TokenRules(
            max_tokens=MAX_MODEL_LEN - STREAM_TOKENS if is_stream else 1, temperature=0.0, ignore_eos=True, seed=0
        )
        tokens = draw.integers(0, engine.info.vocab_size, STREAM_TOKENS if is_stream else 16, dtype=np.int32)
        adapter = None if is_stream else others[index - num_streams]
        return engine.make_request(first_id + index, tokens, params, adapter=adapter)

    times: list[list[float]] = [[] for _ in arrivals]
    num_joined = 0
    with no_collections():
        start = time.perf_counter()
        while num_joined < len(arrivals) or engine.has_unfinished():
            while num_joined < len(arrivals) and arrivals[num_joined] <= time.perf_counter() - start:
                engine.add_request(make_request(num_joined))
                num_joined += 1
            for _, error in engine.release_held():
                raise error
            output = engine.step()
            now = time.perf_counter() - start
            for request_id in () if output is None else output.request_ids.tolist():
                times[request_id - first_id].append(now)
            if all(times[num_streams:]):
                for index in range(num_streams):
                    engine.cancel(first_id + index)
    if any(not each or each[-1] < times[-1][0] - PERIOD_S for each in times[:num_streams]):
        raise SystemExit("the streams ended before the requests beside them: ask for fewer --seconds")
    begin, end = arrivals[num_streams], arrivals[-1] + PERIOD_S
    gaps = [
        later - earlier
        for index in range(num_streams)
        for earlier, later in itertools.pairwise(times[index])
        if begin < later < end
    ]
    answered = [1e3 * (times[index][0] - arrivals[index]) for index in range(num_streams, len(arrivals))]
    return 1e3 * np.array(gaps), answered


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ways = parser.add_subparsers(dest="what", required=True)
    for name in ("prompts", "base"):
        way = ways.add_parser(name)
        way.add_argument("--model", default="llama-3.1-8b")
        way.add_argument("--adapters", type=int, default=8)
        way.add_argument("--tokens", type=int, default=2048)
        way.add_argument("--rows", default="1,64,256")
        way.add_argument("--context", type=int, default=640)
    way = ways.add_parser("swap")
    way.add_argument(
        "--model", type=Path, required=True, help="a checkpoint folder, or a config.json's with dummy weights"
    )
    way.add_argument("--load-format", default="auto")
    way.add_argument("--streams", type=int, default=32)
    way.add_argument("--seconds", type=float, default=5.0)
    arguments = parser.parse_args()
    if arguments.what != "swap" and not torch.cuda.is_available():
        print("no CUDA device: steps are timed on a GPU", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    with torch.inference_mode():
        {"prompts": prompts, "base": base, "swap": swap}[arguments.what](arguments)
    print(
        " ".join(f"{key}={value}" for key, value in conditions("cuda" if torch.cuda.is_available() else "cpu").items())
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
