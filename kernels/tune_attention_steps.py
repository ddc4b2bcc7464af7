"""Choose decode attention's launch parameters in whole captured decode steps.

    python kernels/tune.py attention-steps [--rows 8,32,64,128] [--models llama-3.2-1b] [--seconds 120] [--dry-run]

What is best alone (`tune.py attention`) need not be in a step: a tile's size decides what else fits on a multiprocessor
beside attention, and so how early the kernels before and after it can start. Models whose heads have the same size
share entries and are searched together, at short and long contexts, by the geometric mean of their steps. Plan and
kernel are launched with the same parameters. Entries are marked, and `tune.py attention` leaves them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench_step import DEVICE, make_model, make_runner, new_step, seat, time_step
from captured_steps import CapturedSteps, search_until
from roofline import MODELS
from step_search import CONFIRMING_ROUNDS, Parameters, Search, gains
from tuned_table import BY_STEPS, Table

from cb_backend.kernels.decode_plan import padded_head_dim
from cb_backend.kernels.launch import launch_parameters, next_power_of_2
from cb_backend.models.decoder import DecoderForCausalLM

DEFAULT_ROWS = "1,8,32,64,128"
# Short ones want other sets than long ones. Of 128 rows both caches of heads of 128 fit beside the weights into 80 GB.
CONTEXTS = (256, 640, 1280)
# Also of few rows, which may be long: a set that leaves room for the step's other kernels can read them too slowly.
LONG_CONTEXT, MAX_LONG_ROWS = 3840, 32
REPLAYS = 5
TILES = (  # keys, warps, stages
    (32, 2, 3), (32, 2, 4), (32, 4, 3), (64, 2, 3), (64, 4, 2), (64, 4, 3), (64, 4, 4), (128, 2, 3), (128, 4, 2),
    (128, 4, 3),
)  # fmt: skip
CTAS_PER_SM = (1, 2, 3, 4, 6)
MIN_SPLITS = (64, 128, 256)
MERGED = (4, 8, 16)
# What is tried on the best so far, in this order: tiles, how rows are cut, how the parts are put together again.
CHANGES: tuple[tuple[str, list[Parameters]], ...] = (
    ("tile", [dict(zip(("block_n", "num_warps", "num_stages"), tile, strict=True)) for tile in TILES]),
    ("programs", [{"ctas_per_sm": ctas} for ctas in CTAS_PER_SM]),
    ("split", [{"min_split": split} for split in MIN_SPLITS]),
    ("merging", [{"merged": merged} for merged in MERGED]),
)


@dataclass(frozen=True)
class Entry:
    """What is searched: the entry of one head size and number of rows. Stands where a product's shape does."""

    block_d: int
    m: int
    op: str = "decode_attention"

    @property
    def when(self) -> dict[str, int]:
        return {"block_d": self.block_d, "kv_bytes": 2, "m": self.m}


def contexts_of(num_rows: int) -> tuple[int, ...]:
    """Tokens of every row in the steps that are timed."""
    return (*CONTEXTS, LONG_CONTEXT) if num_rows <= MAX_LONG_ROWS else CONTEXTS


class AttentionSteps(CapturedSteps):
    """A captured step of each model; their time is the geometric mean over models and contexts."""

    def __init__(self, models: list[DecoderForCausalLM], num_rows: int) -> None:
        self.contexts = contexts_of(num_rows)
        lengths = [max(self.contexts)] * num_rows
        runners = [make_runner(model, lengths) for model in models]
        super().__init__([(runner, new_step(runner, num_rows)) for runner in runners], lengths)

    def milliseconds(self, step: list[torch.cuda.CUDAGraph]) -> float:
        times = []
        for (runner, _), graph in zip(self.steps, step, strict=True):
            for context in self.contexts:
                seat(runner, [context] * len(self.lengths))
                times.append(1e3 * time_step(graph, REPLAYS))
        return statistics.geometric_mean(times)


def run_search(search: Search, entry: Entry) -> None:
    """Each kind of change on the best so far, over and over until nothing gains or time is over."""
    before: Parameters | None = None
    while before != search.best[entry]:
        before = search.best[entry]
        for title, many in CHANGES:
            if not search.choose(title, [{entry: {**search.best[entry], **change}} for change in many]):
                return


def tune(models: list[DecoderForCausalLM], entry: Entry, seconds: float) -> Table:
    """The entry found; of one that stays as it is nothing."""
    started = time.perf_counter()
    print(f"heads of {entry.block_d}, {entry.m} rows of {' and '.join(map(str, contexts_of(entry.m)))}", flush=True)
    first = {entry: dict(launch_parameters(entry.op, DEVICE, **entry.when))}
    steps = AttentionSteps(models, entry.m)
    try:
        search = search_until(started + seconds, steps, first)
        run_search(search, entry)
        before, after = search.times(search.make_all([first, search.best]), CONFIRMING_ROUNDS)
    finally:
        steps.close()
    print(f"  first {before:.4f} ms, best {after:.4f} ms ({after / before - 1:+.2%}): {search.best[entry]}", flush=True)
    if search.best == first or not gains(before, after):
        return {}
    return {entry.op: [{"when": entry.when, "use": search.best[entry], **BY_STEPS}]}


@torch.inference_mode()
def run(arguments: argparse.Namespace, save: Callable[[Table], None]) -> None:
    """Search every head size and number of rows; `save` has each entry as soon as it is found."""
    torch.manual_seed(0)
    by_head: dict[int, list[str]] = {}
    for name in arguments.models.split(","):
        by_head.setdefault(padded_head_dim(MODELS[name].head_dim), []).append(name)
    rows = sorted({next_power_of_2(int(number)) for number in (arguments.rows or DEFAULT_ROWS).split(",")})
    for block_d, names in by_head.items():
        models = [make_model(name) for name in names]
        ends = time.perf_counter() + arguments.seconds
        for index, m in enumerate(rows):
            save(tune(models, Entry(block_d, m), (ends - time.perf_counter()) / (len(rows) - index)))
            torch.cuda.empty_cache()
        del models
        torch.cuda.empty_cache()
    print(torch.cuda.get_device_name())
