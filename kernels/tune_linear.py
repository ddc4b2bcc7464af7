"""Find, per weight shape and number of rows, the fastest product on this GPU: a kernel of ours or the library's.

    python kernels/tune.py linear [--quick] [--models qwen3-0.6b] [--rows 256] [--dry-run]

Every product stands behind a small kernel in a CUDA graph, as in a model, and the small kernel's own time is taken off;
weights rotate through more memory than an L2 cache holds. Variants are compiled first by several processes. The best
few of a shape are tried again with prefetches of weights, and then on each number of rows that the entry will serve.
Entries go to `cb_backend/kernels/tuned/<gpu>.json`, all times to `results/linear.csv` (with `--rows` they
are printed only); shapes where the library is faster get no entry.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import TOLERANCE, about_card, relative_error, time_graph, write_csv
from linear_shapes import ROW_GROUPS, Parameters, Shape, candidates, shapes_of

from cb_backend.kernels.launch import can_overlap, next_power_of_2, num_multiprocessors, overriding
from cb_backend.kernels.linear import linear, linear_silu_mul
from cb_backend.kernels.rms_norm import rms_norm
from cb_backend.kernels.silu_mul import silu_mul
from cb_backend.study.machine import measure_card

RowGroups = tuple[tuple[int, ...], ...]
ROTATED_BYTES = 128 << 20
MARGIN = 0.99  # of the library's time: what a kernel must be under to be used
OTHER_LIBRARY_MARGIN = 0.97  # what the other library must be under
FINALISTS = 2


@dataclass
class Bench:
    """One shape's weights and rows, and how to time a product on them."""

    shape: Shape
    num_rows: int
    weights: list[Tensor]

    def __post_init__(self) -> None:
        self.raw, self.x = (
            torch.randn(self.num_rows, self.shape.k, device="cuda").to(torch.bfloat16) for _ in range(2)
        )
        self.scale = torch.ones(self.shape.k, device="cuda", dtype=torch.bfloat16)
        self.norm_seconds = self._time(lambda x, weight: None)
        rms_norm(self.raw, self.scale, 1e-6, out=self.x)
        self.wanted = self.library(self.x, self.weights[0])

    def _time(self, product: Callable[[Tensor, Tensor], Any]) -> float:
        rounds = -(-8 // len(self.weights))

        def launch_all() -> int:
            for weight in self.weights * rounds:
                rms_norm(self.raw, self.scale, 1e-6, out=self.x)
                product(self.x, weight)
            return rounds * len(self.weights)

        return time_graph(launch_all)

    def library(self, x: Tensor, weight: Tensor) -> Tensor:
        product = functional.linear(x, weight)
        return silu_mul(product) if self.shape.op == "linear_silu_mul" else product

    def ours(self, x: Tensor, weight: Tensor) -> Tensor:
        return linear_silu_mul(x, weight) if self.shape.op == "linear_silu_mul" else linear(x, weight)

    def library_seconds(self) -> float:
        return self._time(self.library) - self.norm_seconds

    def seconds(self, parameters: Parameters) -> float:
        """Raises `ValueError` where the result is not the library's."""
        with overriding(self.shape.op, parameters):
            error = relative_error([self.ours(self.x, self.weights[0])], [self.wanted])
            if not error < TOLERANCE:
                raise ValueError(f"differs from the library: relative error {error:.3g}")
            return self._time(self.ours) - self.norm_seconds


def variant(shape: Shape, num_rows: int, parameters: Parameters) -> tuple[Any, ...]:
    """What a compilation depends on."""
    is_even = shape.k % parameters["block_k"] == 0
    rows = max(16, next_power_of_2(num_rows)) if "splits" in parameters else 1
    return shape.op, rows, is_even, tuple(sorted(parameters.items()))


def compile_one(job: tuple[Shape, int, Parameters]) -> str:
    """Runs in a helper process: one launch, which leaves the compiled variant on disk. Returns an error or nothing."""
    shape, num_rows, parameters = job
    try:
        x = torch.zeros(num_rows, shape.k, dtype=torch.bfloat16, device="cuda")
        weight = torch.zeros(shape.weight_rows, shape.k, dtype=torch.bfloat16, device="cuda")
        with overriding(shape.op, parameters):
            linear_silu_mul(x, weight) if shape.op == "linear_silu_mul" else linear(x, weight)
        torch.cuda.synchronize()
        del x, weight
        torch.cuda.empty_cache()  # many helpers share the card
    except Exception as exception:  # too much shared memory, a failing compilation: the variant is left out
        return f"{shape.op} {num_rows} rows {parameters}: {type(exception).__name__}: {exception}"[:200]
    return ""


def compile_all(pool: Any, jobs: list[tuple[Shape, int, Parameters]]) -> None:
    # The smallest shape stands for all that share a variant.
    jobs = sorted((job for job in jobs if "library" not in job[2]), key=lambda job: -job[0].n * job[0].k)
    distinct = {variant(*job): job for job in jobs}
    started = time.perf_counter()
    errors = [error for error in pool.imap_unordered(compile_one, distinct.values()) if error]
    seconds = time.perf_counter() - started
    print(f"compiled {len(distinct)} variants in {seconds:.0f} s", *errors, sep="\n  ", flush=True)


def times_of(bench: Bench, tried: list[Parameters]) -> list[float]:
    """Seconds of each; infinite, and reported, where it fails."""
    times = []
    for parameters in tried:
        try:
            times.append(max(bench.seconds(parameters), 1e-7))
        except Exception as exception:  # as in compile_one
            print(f"  left out {bench.shape.name} {bench.num_rows} {parameters}: {exception}"[:200], flush=True)
            times.append(math.inf)
    return times


def prefetching(parameters: Parameters) -> list[Parameters]:
    return [] if "library" in parameters else [parameters | {"prefetch": elements} for elements in (256, 1024)]


def make_weights(shape: Shape) -> list[Tensor]:
    size = (shape.weight_rows, shape.k)
    sets = max(2, -(-ROTATED_BYTES // (2 * shape.weight_rows * shape.k)))
    return [torch.randn(size, device="cuda", dtype=torch.bfloat16) / shape.k**0.5 for _ in range(sets)]


def tune_all(
    shapes: list[Shape], groups: RowGroups, is_quick: bool, bandwidth: float, helpers: int
) -> list[dict[str, Any]]:
    """One row of results a shape and number of rows."""
    num_sms = num_multiprocessors(torch.device("cuda", torch.cuda.current_device()))
    has_prefetches = can_overlap(torch.device("cuda", torch.cuda.current_device()))
    tried = {(s, g[0]): list(candidates(s, g[0], num_sms, is_quick)) for s in shapes for g in groups}
    with multiprocessing.get_context("spawn").Pool(helpers) as pool:
        compile_all(pool, [(s, m, parameters) for (s, m), many in tried.items() for parameters in many])
        for shape in shapes:
            weights = make_weights(shape)
            for m in (group[0] for group in groups):
                times = times_of(Bench(shape, m, weights), tried[shape, m])
                best = [tried[shape, m][i] for i in sorted(range(len(times)), key=times.__getitem__)[:FINALISTS]]
                tried[shape, m] = best + [more for found in best if has_prefetches for more in prefetching(found)]
        print("timed the first round", flush=True)
        compile_all(pool, [(s, m, parameters) for (s, m), many in tried.items() for parameters in many])
    results = []
    for shape in shapes:
        weights = make_weights(shape)
        for group in groups:
            results += group_results([Bench(shape, m, weights) for m in group], tried[shape, group[0]], bandwidth)
    return results


def group_results(benches: list[Bench], tried: list[Parameters], bandwidth: float) -> list[dict[str, Any]]:
    """A row of results for each number of rows, all at the parameters with the least geometric mean of times."""
    times = [times_of(bench, tried) for bench in benches]
    costs = [sum(map(math.log, column)) for column in zip(*times, strict=True)]
    best = min(range(len(tried)), key=costs.__getitem__, default=None)
    rows = []
    for bench, found in sorted(zip(benches, times, strict=True), key=lambda pair: pair[0].num_rows):
        seconds = math.inf if best is None else found[best]
        rows.append(result(bench, seconds, {} if best is None else tried[best], bandwidth))
    # Rows that share an entry stand or fall together.
    for row in rows:
        sharing = [other for other in rows if next_power_of_2(other["m"]) == next_power_of_2(row["m"])]
        ours, library = (math.prod(other[name] for other in sharing) for name in ("ours_us", "library_us"))
        margin = OTHER_LIBRARY_MARGIN if "library" in row["parameters"] else MARGIN
        row["winner"] = "ours" if ours < margin ** len(sharing) * library else "library"
    return rows


def result(bench: Bench, seconds: float, parameters: Parameters, bandwidth: float) -> dict[str, Any]:
    shape, library = bench.shape, bench.library_seconds()
    return {
        "op": shape.op, "shape": shape.name, "n": shape.n, "k": shape.k, "m": bench.num_rows,
        "library_us": round(1e6 * library, 2), "ours_us": round(1e6 * seconds, 2),
        "floor_us": round(1e6 * shape.num_bytes(bench.num_rows) / bandwidth, 2),
        "norm_us": round(1e6 * bench.norm_seconds, 2), "winner": "",
        "parameters": " ".join(f"{name}={value}" for name, value in parameters.items()),
    }  # fmt: skip


def entries(rows: list[dict[str, Any]], op: str) -> list[dict[str, Any]]:
    """The table of an op: what `launch_parameters` reads."""
    found = []
    for row in rows:
        if row["op"] == op and row["winner"] == "ours" and row["m"] == next_power_of_2(row["m"]):
            use = {name: int(value) for name, _, value in (part.partition("=") for part in row["parameters"].split())}
            found.append({"when": {name: row[name] for name in ("n", "k", "m")}, "use": use})
    return found


def row_groups(asked: str | None) -> RowGroups:
    """All groups of rows, or those that begin with the numbers asked for."""
    return tuple(group for group in ROW_GROUPS if asked is None or str(group[0]) in asked.split(","))


def is_of(entry: dict[str, Any], arguments: argparse.Namespace) -> bool:
    """Whether a table's entry is for a product and a number of rows that were tuned."""
    when, shapes = entry["when"], shapes_of(arguments.models.split(","))
    tuned = {next_power_of_2(m) for group in row_groups(arguments.rows) for m in group}
    return when["m"] in tuned and any((s.n, s.k) == (when["n"], when["k"]) for s in shapes)


def print_rows(rows: list[dict[str, Any]]) -> None:
    print(f"{'shape':24} {'[n, k]':>15} {'m':>4} {'library':>8} {'ours':>8} {'floor':>8}  winner")
    for row in rows:
        print(
            f"{row['shape']:24} {row['n']:>8} {row['k']:>6} {row['m']:4} {row['library_us']:8.2f} {row['ours_us']:8.2f}"
            f" {row['floor_us']:8.2f}  {row['winner']:7} {row['parameters']}"
        )


def run(arguments: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Tune, print and write the CSV. Returns the table's entries by op."""
    started = time.perf_counter()
    card = measure_card("cuda", "bfloat16")
    if card is None:
        raise SystemExit("no memory left on the GPU to measure its limits")
    torch.cuda.empty_cache()
    about = about_card(card)
    helpers = max(1, min(14, (os.cpu_count() or 2) - 2))
    shapes, groups = shapes_of(arguments.models.split(",")), row_groups(arguments.rows)
    rows = tune_all(shapes, groups, arguments.quick, card.bandwidth, helpers)
    print_rows(rows)
    print(*(f"{name}={value}" for name, value in about.items()), f"in {time.perf_counter() - started:.0f} s")
    if not arguments.dry_run and arguments.rows is None:
        write_csv(Path(__file__).parent / "results", "linear", rows, about)
    return {op: entries(rows, op) for op in ("linear", "linear_silu_mul")}
