"""Choose the launch parameters of products in whole captured decode steps.

    python kernels/tune.py steps [--rows 1,2,8,16,32] [--models llama-3.2-1b] [--seconds 120] [--quick] [--dry-run]

What is best alone (`tune_linear.py`) need not be in a step, where kernels start while the one before runs and L2 holds
what that one left. So tiles, prefetches and, where it is a candidate, the library are tried in the step itself
(`step_search.py`), within a time a model. Numbers of rows that share entries (`ROW_GROUPS`) are searched together, by
the geometric mean of their steps. Entries are marked, and `tune.py linear` leaves them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench_step import DEVICE, make_model, make_runner, new_step, seat, time_step
from captured_steps import CapturedSteps, search_until
from linear_shapes import Parameters, Shape, candidates, served_with, shapes_of
from step_search import CONFIRMING_ROUNDS, Search, Settings
from tuned_table import BY_STEPS, Table

from cb_backend.kernels.launch import can_overlap, launch_parameters, next_power_of_2, num_multiprocessors
from cb_backend.models.decoder import DecoderForCausalLM

PREFETCHES = (0, 256, 512, 1024)
COMPARED_STEPS = 8
DEFAULT_ROWS = "1,8,32,64,128"


def tried(shape: Shape, num_rows: int, num_sms: int, is_quick: bool) -> list[Parameters]:
    """What is worth trying on a product in a step: its tiles, alone and with the norm before it, and the library."""
    many = list(candidates(shape, num_rows, num_sms, is_quick))
    if shape.can_have_norm:
        many += [{**tile, "norm": 1} for tile in many if "vector" in tile and "fold" in tile]
    if {"library": 2} in many:
        many.append({"library": 1})
    return many


class DecodeSteps(CapturedSteps):
    """Captured steps of a model, one of each number of rows; a step's time is their geometric mean."""

    def __init__(self, model: DecoderForCausalLM, rows: list[int], context: int) -> None:
        lengths = [context] * max(rows)
        runner = make_runner(model, lengths)
        super().__init__([(runner, new_step(runner, num_rows)) for num_rows in rows], lengths)

    def milliseconds(self, step: list[torch.cuda.CUDAGraph]) -> float:
        times = []
        for (runner, _), graph in zip(self.steps, step, strict=True):
            seat(runner, self.lengths)
            times.append(1e3 * time_step(graph))
        return statistics.geometric_mean(times)

    def tokens(self, step: list[torch.cuda.CUDAGraph]) -> Tensor:
        """[steps, rows of all graphs], from the same state: a step writes the cache before it reads what it wrote."""
        found = []
        for (runner, buffers), graph in zip(self.steps, step, strict=True):
            seat(runner, self.lengths)
            results = []
            for _ in range(COMPARED_STEPS):
                graph.replay()
                results.append(buffers.result[0].clone())
            found.append(torch.stack(results))
        torch.cuda.synchronize()
        return torch.cat(found, dim=1)


def entries(chosen: Settings, num_rows: int) -> Table:
    """The table's, of all numbers of rows that are to have the same."""
    table: Table = {}
    for shape, use in chosen.items():
        for m in served_with(num_rows):
            table.setdefault(shape.op, []).append({"when": {**shape.when, "m": m}, "use": use, **BY_STEPS})
    return table


def compared(search: Search, steps: DecodeSteps, first: Settings) -> str:
    """Times and tokens of the first settings and the best."""
    made = search.make_all([first, search.best])
    if None in made:
        return "  first and best cannot be compared"
    before, after = search.times(made, CONFIRMING_ROUNDS)
    is_other = (steps.tokens(made[0]) != steps.tokens(made[1])).any(0)  # [rows]
    tokens = "the same tokens"
    if is_other.any():
        tokens = f"other tokens in {int(is_other.sum())} of {len(is_other)} rows, as sums in another order may give"
    return f"  first {before:.4f} ms, best {after:.4f} ms ({after / before - 1:+.2%}), {tokens}"


def tune(model: DecoderForCausalLM, name: str, rows: list[int], arguments: argparse.Namespace, seconds: float) -> Table:
    """Entries of the products that were tried, changed or not."""
    started = time.perf_counter()
    print(f"{name}, {' and '.join(map(str, rows))} rows of context {arguments.context}, {seconds:.0f} s", flush=True)
    shapes, most = shapes_of([name]), max(rows)
    key, num_sms = served_with(most)[-1], num_multiprocessors(DEVICE)
    tiles = {shape: tried(shape, key, num_sms, arguments.quick) for shape in shapes}
    first = {s: launch_parameters(s.op, DEVICE, **s.when, m=next_power_of_2(most)) for s in shapes}
    steps = DecodeSteps(model, rows, arguments.context)
    try:
        search = search_until(started + seconds, steps, first)
        search.run(tiles, PREFETCHES if can_overlap(DEVICE) else ())
        print(compared(search, steps, first), flush=True)
    finally:
        steps.close()
    print(f"  in {time.perf_counter() - started:.0f} s", flush=True)
    return entries({s: use for s, use in search.best.items() if s in search.tried or use != first[s]}, most)


@torch.inference_mode()
def run(arguments: argparse.Namespace, save: Callable[[Table], None]) -> None:
    """Search every model and group of rows; `save` has each one's entries as soon as they are found."""
    torch.manual_seed(0)
    groups: dict[tuple[int, ...], list[int]] = {}
    for num_rows in map(int, (arguments.rows or DEFAULT_ROWS).split(",")):
        groups.setdefault(tuple(served_with(num_rows)), []).append(num_rows)
    for name in arguments.models.split(","):
        model = make_model(name)
        ends = time.perf_counter() + arguments.seconds
        for index, rows in enumerate(groups.values()):
            save(tune(model, name, rows, arguments, (ends - time.perf_counter()) / (len(groups) - index)))
            torch.cuda.empty_cache()
        del model
        torch.cuda.empty_cache()
    print(torch.cuda.get_device_name())
