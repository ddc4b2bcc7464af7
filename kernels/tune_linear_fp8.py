"""Find, per weight shape and number of rows, the fastest product with fp8 weights: our kernel or the library's.

    python kernels/tune_linear_fp8.py [--models llama-3.1-8b] [--quick] [--dry-run]

As `tune.py linear` does for bf16: products stand behind the norm kernel that makes their rows, in a CUDA graph, and
that kernel's own time is taken off. The library's is torch._scaled_mm with a scale a row on both sides. The time of
the product as it is served in bf16 is in the column bf16_us. From 256 rows on there is the library's alone.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import about_card, relative_error, time_graph, write_csv
from linear_shapes import Parameters, Shape, candidates, shapes_of
from roofline import MODELS
from tuned_table import own_path, read_table, write_table

from cb_backend.kernels.fp8 import Fp8Rows, quantize_rows_torch
from cb_backend.kernels.launch import num_multiprocessors, overriding
from cb_backend.kernels.linear import linear, linear_silu_mul
from cb_backend.kernels.linear_fp8 import linear_fp8, linear_fp8_torch, linear_silu_mul_fp8, linear_silu_mul_fp8_torch
from cb_backend.kernels.rms_norm import add_rms_norm, add_rms_norm_fp8
from cb_backend.study.machine import measure_card

ROTATED_BYTES = 128 << 20
MARGIN = 0.99  # of the library's time: what our kernel must be under to be used
TOLERANCE = 1e-2  # ||out - twin|| / ||twin||; out is rounded to bf16
# Rows that share an entry; candidates are compared on the first of them.
ROW_GROUPS = ((1,), (8, 2, 4, 16), (32,), (64,), (128,))
LIBRARY_ALONE = (256, 2048)
Weight = tuple[Tensor, Tensor]  # values, scales


def make_weight(shape: Shape) -> Weight:
    rows = quantize_rows_torch(torch.randn(shape.weight_rows, shape.k, device="cuda") / shape.k**0.5)
    return rows.values, rows.scales


def product(shape: Shape, rows: Fp8Rows, weight: Weight) -> Tensor:
    return linear_silu_mul_fp8(rows, *weight) if shape.is_gated else linear_fp8(rows, *weight)


class Bench:
    """One shape's weights and rows, and how to time a product on them."""

    def __init__(self, shape: Shape, num_rows: int, weights: list[Weight]) -> None:
        self.shape, self.num_rows, self.weights = shape, num_rows, weights
        self.x, self.residual = (torch.randn(num_rows, shape.k, device="cuda").to(torch.bfloat16) for _ in range(2))
        self.norm = torch.ones(shape.k, device="cuda", dtype=torch.bfloat16)
        self.rows = add_rms_norm_fp8(self.x, self.residual, self.norm, 1e-6)[0]
        twin = linear_silu_mul_fp8_torch if shape.is_gated else linear_fp8_torch
        self.wanted = twin(self.rows, *weights[0])
        self.norm_seconds = self._time(lambda rows, weight: None)

    def _time(self, call: Callable[[Fp8Rows, Weight], Any]) -> float:
        rounds = -(-8 // len(self.weights))

        def launch_all() -> int:
            for weight in self.weights * rounds:
                call(add_rms_norm_fp8(self.x, self.residual, self.norm, 1e-6)[0], weight)
            return rounds * len(self.weights)

        return time_graph(launch_all)

    def seconds(self, parameters: Parameters) -> float:
        """Raises `ValueError` where the result is not the twin's."""
        with contextlib.ExitStack() as stack:
            for op in {self.shape.op, "linear_fp8"}:  # the gated product is a plain one where the library makes it
                stack.enter_context(overriding(op, parameters))
            error = relative_error([product(self.shape, self.rows, self.weights[0])], [self.wanted])
            if not error < TOLERANCE:
                raise ValueError(f"differs from the twin: relative error {error:.3g}")
            return self._time(lambda rows, weight: product(self.shape, rows, weight)) - self.norm_seconds

    def bf16_seconds(self) -> float:
        """The same product with bf16 weights, as it is served; without its norm as well."""
        size, sets = (self.shape.weight_rows, self.shape.k), max(2, len(self.weights) // 2)
        weights = [torch.randn(size, device="cuda", dtype=torch.bfloat16) / self.shape.k**0.5 for _ in range(sets)]
        call = linear_silu_mul if self.shape.is_gated else linear
        rounds = -(-8 // len(weights))

        def launch_all(has_product: bool) -> int:
            for weight in weights * rounds:
                x = add_rms_norm(self.x, self.residual, self.norm, 1e-6)[0]
                if has_product:
                    call(x, weight)
            return rounds * len(weights)

        return time_graph(lambda: launch_all(True)) - time_graph(lambda: launch_all(False))


def compile_one(job: tuple[Shape, int, Parameters]) -> str:
    """Runs in a helper process: one launch, which leaves the compiled variant on disk. Returns an error or nothing."""
    shape, num_rows, parameters = job
    try:
        rows = Fp8Rows(
            torch.zeros(num_rows, shape.k, dtype=torch.float8_e4m3fn, device="cuda"),
            torch.ones(num_rows, device="cuda"),
            torch.bfloat16,
        )
        weight = torch.zeros(shape.weight_rows, shape.k, dtype=torch.float8_e4m3fn, device="cuda")
        with overriding(shape.op, parameters):
            product(shape, rows, (weight, torch.ones(shape.weight_rows, device="cuda")))
        torch.cuda.synchronize()
        del rows, weight
        torch.cuda.empty_cache()  # many helpers share the card
    except Exception as exception:  # too much shared memory, a failing compilation: the variant is left out
        return f"{shape.op} {num_rows} rows {parameters}: {type(exception).__name__}: {exception}"[:200]
    return ""


def compile_all(tried: dict[tuple[Shape, int], list[Parameters]], helpers: int) -> None:
    distinct: dict[tuple[Any, ...], tuple[Shape, int, Parameters]] = {}
    for (shape, num_rows), many in tried.items():
        for parameters in many:
            is_even = shape.k % parameters["block_k"] == 0
            key = (shape.op, max(16, num_rows), is_even, tuple(sorted(parameters.items())))
            distinct.setdefault(key, (shape, num_rows, parameters))
    started = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(helpers) as pool:
        errors = [error for error in pool.imap_unordered(compile_one, distinct.values()) if error]
    seconds = time.perf_counter() - started
    print(f"compiled {len(distinct)} variants in {seconds:.0f} s", *errors, sep="\n  ", flush=True)


def best_of(bench: Bench, tried: list[Parameters]) -> Parameters | None:
    best, best_seconds = None, math.inf
    for parameters in tried:
        try:
            seconds = bench.seconds(parameters)
        except Exception as exception:  # as in compile_one
            print(f"  left out {bench.shape.name} {bench.num_rows} {parameters}: {exception}"[:200])
            continue
        if seconds < best_seconds:
            best, best_seconds = parameters, seconds
    return best


def row(bench: Bench, parameters: Parameters | None, bandwidth: float) -> dict[str, Any]:
    """One row of results; parameters None: the library alone."""
    library, shape = bench.seconds({"library": 1}), bench.shape
    ours = math.inf if parameters is None else bench.seconds(parameters)
    return {
        "op": shape.op, "shape": shape.name, "n": shape.n, "k": shape.k, "m": bench.num_rows,
        "bf16_us": round(1e6 * bench.bf16_seconds(), 2), "library_us": round(1e6 * library, 2),
        "ours_us": round(1e6 * ours, 2) if math.isfinite(ours) else "",
        "floor_us": round(1e6 * shape.num_bytes(bench.num_rows) / bandwidth, 2),
        "winner": "ours" if ours < MARGIN * library else "library",
        "parameters": " ".join(f"{name}={value}" for name, value in (parameters or {}).items()),
    }  # fmt: skip


def tune_all(shapes: list[Shape], is_quick: bool, bandwidth: float, helpers: int) -> list[dict[str, Any]]:
    num_sms = num_multiprocessors(torch.device("cuda", torch.cuda.current_device()))
    tried = {(s, g[0]): list(candidates(s, g[0], num_sms, is_quick)) for s in shapes for g in ROW_GROUPS}
    compile_all(tried, helpers)
    results = []
    for shape in shapes:
        sets = max(2, -(-ROTATED_BYTES // (shape.weight_rows * shape.k)))
        weights = [make_weight(shape) for _ in range(sets)]
        for group in ROW_GROUPS:
            parameters = best_of(Bench(shape, group[0], weights), tried[shape, group[0]])
            results += [row(Bench(shape, num_rows, weights), parameters, bandwidth) for num_rows in sorted(group)]
        results += [row(Bench(shape, num_rows, weights), None, bandwidth) for num_rows in LIBRARY_ALONE]
        print_rows(results[-len(LIBRARY_ALONE) - sum(map(len, ROW_GROUPS)) :])
        torch.cuda.empty_cache()
    return results


def print_rows(rows: list[dict[str, Any]]) -> None:
    for found in rows:
        print(
            f"{found['shape']:22} {found['n']:>7}x{found['k']:<6} m {found['m']:4} bf16 {found['bf16_us']:8}"
            f" library {found['library_us']:8} ours {found['ours_us']:8} floor {found['floor_us']:8}"
            f" {found['winner']:7} {found['parameters']}",
            flush=True,
        )


def entries(rows: list[dict[str, Any]], op: str) -> list[dict[str, Any]]:
    """The table of an op: what `launch_parameters` reads."""
    found = []
    for each in rows:
        if each["op"] == op and each["winner"] == "ours":
            use = {name: int(value) for name, _, value in (part.partition("=") for part in each["parameters"].split())}
            found.append({"when": {name: each[name] for name in ("n", "k", "m")}, "use": use})
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--quick", action="store_true", help="fewer candidates")
    parser.add_argument("--dry-run", action="store_true", help="print, do not write")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    card = measure_card("cuda", "bfloat16") if torch.cuda.is_available() else None
    if card is None:
        print("no CUDA device, or none with memory left: launch parameters are found on their GPU", file=sys.stderr)
        return 2
    torch.cuda.empty_cache()
    about = about_card(card)
    helpers = max(1, min(14, (os.cpu_count() or 2) - 2))
    rows = tune_all(fp8_shapes(arguments.models.split(",")), arguments.quick, card.bandwidth, helpers)
    if not arguments.dry_run:
        write_csv(arguments.out, "linear_fp8", rows, about)
        device = torch.device("cuda", torch.cuda.current_device())
        tuned = read_table(device)
        for op in ("linear_fp8", "linear_silu_mul_fp8"):
            measured = {(each["n"], each["k"]) for each in rows if each["op"] == op}
            others = [e for e in tuned.get(op, []) if (e["when"]["n"], e["when"]["k"]) not in measured]
            tuned[op] = [*others, *entries(rows, op)]
        write_table(tuned, own_path(device))
    return 0


def fp8_shapes(models: list[str]) -> list[Shape]:
    """The models' products with quantised weights: all but the head's."""
    shapes = [shape for shape in shapes_of(models) if not shape.name.endswith("lm_head")]
    return [Shape(f"{shape.op}_fp8", shape.n, shape.k, shape.name) for shape in shapes]


if __name__ == "__main__":
    sys.exit(main())
