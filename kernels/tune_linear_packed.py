"""Find, per weight shape, number of rows and bits, the fastest product with packed weights, beside the bf16 product.

    python kernels/tune_linear_packed.py [--models llama-3.1-8b] [--formats int4,fp8] [--rows 1,16] [--quick]

As `tune_linear_fp8.py` does: products stand behind the norm kernel that makes their rows, in a CUDA graph, and that
kernel's own time is taken off. More rows than the kernel takes are the library's on pieces written out in bf16. Entries
are by bits: those of int4 serve fp4 where it has none of its own, those of fp8 serve int8. The time of the product as
it is served in bf16 is in the column bf16_us.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import about_card, relative_error, time_graph, write_csv
from linear_shapes import Parameters, Shape, shapes_of, splits_for
from roofline import MODELS
from tune_linear_fp8 import best_of
from tuned_table import own_path, put, read_table, write_table

from cb_backend.kernels.launch import num_multiprocessors, overriding
from cb_backend.kernels.linear import linear, linear_silu_mul
from cb_backend.kernels.linear_packed import (
    MAX_BLOCK_M,
    MAX_DIRECT_ROWS,
    linear_packed,
    linear_packed_torch,
    linear_silu_mul_packed,
    linear_silu_mul_packed_torch,
)
from cb_backend.kernels.packed import KINDS, PackedWeight, pack
from cb_backend.kernels.rms_norm import add_rms_norm
from cb_backend.study.machine import measure_card

GROUPS = {"int4": 128, "int8": 128, "fp8": 128, "mxfp4": 32, "nvfp4": 16}
ROTATED_BYTES = 128 << 20
TOLERANCE = 2e-2  # ||out - twin|| / ||twin||; out is rounded to bf16, gated ones twice
# Rows that share an entry; candidates are compared on the first of them.
ROW_GROUPS = ((1,), (16, 2, 4, 8), (32,), (64,), (128,), (256,))
LIBRARY_ALONE = (2048,)


def _tile(block_n: int, num_warps: int, num_stages: int, **more: int) -> Parameters:
    return {"block_n": block_n, "num_warps": num_warps, "num_stages": num_stages, **more}


# By the most rows they are tried with; the first four are the quick ones. More than 128 registers a thread of 8 warps,
# or 168 of 4, would leave a multiprocessor to fewer programs; one row needs no tile of 16.
TILES = {
    1: (_tile(64, 2, 4, block_m=8), _tile(128, 4, 4), _tile(64, 2, 4), _tile(128, 4, 4, block_m=8), _tile(64, 4, 6),
        _tile(64, 2, 6, block_m=8), _tile(128, 8, 4),
        _tile(64, 4, 4, block_m=8), _tile(32, 2, 6, block_m=8), _tile(64, 4, 4, join=1)),
    16: (_tile(64, 2, 4), _tile(128, 4, 4), _tile(64, 4, 6), _tile(64, 4, 4), _tile(128, 8, 4), _tile(64, 2, 6),
         _tile(64, 4, 4, join=1)),
    32: (_tile(128, 8, 4), _tile(64, 4, 4), _tile(128, 4, 4), _tile(64, 4, 6), _tile(64, 2, 4),
         _tile(64, 4, 4, maxnreg=128), _tile(128, 8, 4, join=1)),
    64: (_tile(128, 8, 3, maxnreg=128), _tile(64, 4, 4), _tile(64, 4, 3), _tile(64, 4, 3, maxnreg=128),
         _tile(128, 8, 4, maxnreg=128), _tile(256, 8, 3), _tile(128, 8, 4, join=1), _tile(64, 4, 3, join=2)),
    128: (_tile(128, 8, 3), _tile(64, 4, 3), _tile(128, 8, 3, join=2), _tile(128, 8, 3, join=1),
          _tile(128, 8, 3, scale_first=1), _tile(128, 8, 2, scale_first=1, maxnreg=128), _tile(64, 4, 3, maxnreg=168),
          _tile(64, 4, 2, maxnreg=168, scale_first=1)),
    256: (_tile(128, 8, 3), _tile(64, 4, 3), _tile(128, 8, 3, join=2), _tile(128, 8, 3, join=1),
          _tile(128, 8, 2, scale_first=1, maxnreg=128), _tile(64, 4, 3, maxnreg=168),
          _tile(64, 4, 2, maxnreg=168, scale_first=1), _tile(64, 4, 3, block_m=64)),
}  # fmt: skip
PREFETCHES = (0, 16384)
# Of the kernel that reads weights into registers; pairs of rows and warps bound the registers there are for sums.
DIRECT = tuple(
    {"pairs": pairs, "num_warps": warps, "depth": depth}
    for pairs, warps, depths in (
        (1, 4, (1, 2)),
        (1, 8, (1, 2)),
        (1, 16, (1, 2)),
        (2, 4, (1,)),
        (2, 8, (1,)),
        (2, 16, (1,)),
    )
    for depth in depths
)


def make_weight(shape: Shape, name: str) -> PackedWeight:
    kind = "fp4" if name.endswith("fp4") else name
    stored = torch.randint(0, 2 ** KINDS[kind].bits, (shape.weight_rows, shape.k), dtype=torch.uint8, device="cuda")
    if kind == "fp8":
        stored.masked_fill_((stored & 0x7F) == 0x7F, 3)  # no NaN
    group = GROUPS[name]
    scales = torch.rand(shape.weight_rows, shape.k // group, device="cuda") + 0.5
    scales = scales * (2.0 ** -(KINDS[kind].bits + 3) if kind != "fp8" else 2.0**-12)
    if name == "mxfp4":
        scales = 2.0 ** scales.log2().round()
    scales = scales if kind == "fp8" else scales.to(torch.bfloat16)
    return pack(stored, scales, kind, group, is_gated=shape.is_gated)


def product(x: Tensor, weight: PackedWeight) -> Tensor:
    return linear_silu_mul_packed(x, weight) if weight.is_gated else linear_packed(x, weight)


def op_of(shape: Shape) -> str:
    return f"{shape.op}_packed"


class Bench:
    """One shape's weights and rows, and how to time a product on them."""

    def __init__(self, shape: Shape, num_rows: int, weights: list[PackedWeight]) -> None:
        self.shape, self.num_rows, self.weights = shape, num_rows, weights
        self.x, self.residual = (torch.randn(num_rows, shape.k, device="cuda").to(torch.bfloat16) for _ in range(2))
        self.norm = torch.ones(shape.k, device="cuda", dtype=torch.bfloat16)
        self.normed = add_rms_norm(self.x, self.residual, self.norm, 1e-6)[0]
        twin = linear_silu_mul_packed_torch if shape.is_gated else linear_packed_torch
        self.wanted = twin(self.normed, weights[0])
        self.norm_seconds = self._time(weights, lambda x, weight: None)

    def _time(self, weights: list[Any], call: Callable[[Tensor, Any], Any]) -> float:
        rounds = -(-8 // len(weights))

        def launch_all() -> int:
            for weight in weights * rounds:
                call(add_rms_norm(self.x, self.residual, self.norm, 1e-6)[0], weight)
            return rounds * len(weights)

        return time_graph(launch_all)

    def seconds(self, parameters: Parameters | None) -> float:
        """With these launch parameters, or as it is served. Raises `ValueError` where the result is not the twin's."""
        with contextlib.ExitStack() as stack:
            if parameters is not None:
                stack.enter_context(overriding(op_of(self.shape), parameters))
            error = relative_error([product(self.normed, self.weights[0])], [self.wanted])
            if not error < TOLERANCE:
                raise ValueError(f"differs from the twin: relative error {error:.3g}")
            return self._time(self.weights, product) - self.norm_seconds

    def bf16_seconds(self) -> float:
        """The same product with bf16 weights, as it is served."""
        size, sets = (self.shape.weight_rows, self.shape.k), max(2, len(self.weights) // 4)
        weights = [torch.randn(size, device="cuda", dtype=torch.bfloat16) / self.shape.k**0.5 for _ in range(sets)]
        return self._time(weights, linear_silu_mul if self.shape.is_gated else linear) - self.norm_seconds


def candidates(shape: Shape, num_rows: int, num_sms: int, is_quick: bool) -> Iterator[Parameters]:
    """Tiles that fit, with splits that give every multiprocessor something to read."""
    num_blocks = shape.k // 128
    if num_rows <= MAX_DIRECT_ROWS:
        yield from (each for each in DIRECT if each["pairs"] * each["num_warps"] * num_rows <= 512 or num_rows == 1)
    tiles = TILES[next(rows for rows in TILES if rows >= num_rows)]
    for tile in tiles[:4] if is_quick else tiles:
        num_tiles = -(-shape.weight_rows // tile["block_n"]) * -(-num_rows // tile.get("block_m", MAX_BLOCK_M))
        shares = (0, 1, 2, 4) if num_rows > 16 else (1, 2, 4, 6)
        for splits in sorted({splits_for(num_tiles, num_sms * share, num_blocks) for share in shares}):
            if splits > 1 and 6 * num_rows * splits > shape.k:
                continue  # its partial sums would come near to the bytes of the weights
            for prefetch in PREFETCHES if num_rows <= 16 else PREFETCHES[:1]:
                yield {**tile, "splits": splits, **({"prefetch": prefetch} if prefetch else {})}
    if num_rows > 64:
        yield {"library": 1}


def compile_one(job: tuple[Shape, str, int, Parameters]) -> str:
    """Runs in a helper process: one launch, which leaves the compiled variant on disk. Returns an error or nothing."""
    shape, name, num_rows, parameters = job
    try:
        weight = make_weight(Shape(shape.op, 512, shape.k, shape.name), name)
        with overriding(op_of(shape), parameters):
            product(torch.zeros(num_rows, shape.k, dtype=torch.bfloat16, device="cuda"), weight)
        torch.cuda.synchronize()
        del weight
        torch.cuda.empty_cache()  # many helpers share the card
    except Exception as exception:  # too much shared memory, a failing compilation: the variant is left out
        return f"{shape.op} {name} {num_rows} rows {parameters}: {type(exception).__name__}: {exception}"[:200]
    return ""


def compile_all(jobs: list[tuple[Shape, str, int, Parameters]], helpers: int) -> None:
    distinct: dict[tuple[Any, ...], tuple[Shape, str, int, Parameters]] = {}
    for shape, name, num_rows, parameters in jobs:
        key = (shape.op, name, max(16, num_rows), tuple(sorted(parameters.items())))
        distinct.setdefault(key, (shape, name, num_rows, parameters))
    started = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(helpers) as pool:
        errors = [error for error in pool.imap_unordered(compile_one, distinct.values(), chunksize=4) if error]
    seconds = time.perf_counter() - started
    print(f"compiled {len(distinct)} variants in {seconds:.0f} s", *errors[:8], sep="\n  ", flush=True)


def row(bench: Bench, name: str, parameters: Parameters | None, bandwidth: float) -> dict[str, Any]:
    """One row of results; parameters None: as it is served without an entry."""
    shape, num_rows = bench.shape, bench.num_rows
    num_bytes = bench.weights[0].num_bytes + 2 * num_rows * (shape.k + shape.n)
    return {
        "op": op_of(shape), "format": name, "shape": shape.name, "n": shape.n, "k": shape.k, "m": num_rows,
        "bf16_us": round(1e6 * bench.bf16_seconds(), 2),
        "default_us": round(1e6 * bench.seconds(None), 2),
        "ours_us": round(1e6 * bench.seconds(parameters), 2),
        "floor_us": round(1e6 * num_bytes / bandwidth, 2),
        "parameters": " ".join(f"{key}={value}" for key, value in (parameters or {}).items()),
    }  # fmt: skip


def print_rows(rows: list[dict[str, Any]]) -> None:
    for found in rows:
        print(
            f"{found['format']:6} {found['shape']:22} {found['n']:>7}x{found['k']:<6} m {found['m']:4}"
            f" bf16 {found['bf16_us']:8} default {found['default_us']:8} ours {found['ours_us']:8}"
            f" floor {found['floor_us']:7} {found['parameters']}",
            flush=True,
        )


def entries(rows: list[dict[str, Any]], op: str) -> list[dict[str, Any]]:
    """The table of an op: what `launch_parameters` reads."""
    found = []
    for each in rows:
        if each["op"] == op and each["parameters"]:
            use = {name: int(value) for name, _, value in (part.partition("=") for part in each["parameters"].split())}
            kind = {"bits": 4 if each["format"].endswith("4") else 8}
            if each["format"].endswith("fp4"):
                kind["is_float"] = 1
            if "pairs" in use:
                kind["is_direct"] = 1
            n = each["n"] * (2 if op.startswith("linear_silu_mul") else 1)  # rows of the weight
            found.append({"when": {"n": n, "k": each["k"], "m": each["m"], **kind}, "use": use})
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--formats", default="int4,fp8", help=f"of {', '.join(GROUPS)}")
    parser.add_argument("--rows", help="only groups with one of these numbers of rows")
    parser.add_argument("--quick", action="store_true", help="fewer candidates")
    parser.add_argument("--dry-run", action="store_true", help="print, do not write")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    card = measure_card("cuda", "bfloat16") if torch.cuda.is_available() else None
    if card is None:
        print("no CUDA device, or none with memory left: launch parameters are found on their GPU", file=sys.stderr)
        return 2
    torch.cuda.empty_cache()
    device = torch.device("cuda", torch.cuda.current_device())
    num_sms = num_multiprocessors(device)
    wanted_rows = None if arguments.rows is None else set(map(int, arguments.rows.split(",")))
    row_groups = [group for group in ROW_GROUPS if wanted_rows is None or wanted_rows & set(group)]
    shapes = [shape for shape in shapes_of(arguments.models.split(",")) if not shape.name.endswith("lm_head")]
    names = arguments.formats.split(",")
    tried = {(s, g[0]): list(candidates(s, g[0], num_sms, arguments.quick)) for s in shapes for g in row_groups}
    jobs = [(s, name, m, p) for (s, m), many in tried.items() for name in names for p in many]
    compile_all(jobs, max(1, min(14, (os.cpu_count() or 2) - 2)))
    rows: list[dict[str, Any]] = []
    for shape in shapes:
        for name in names:
            first = make_weight(shape, name)
            sets = max(2, -(-ROTATED_BYTES // first.num_bytes))
            weights = [first, *(make_weight(shape, name) for _ in range(sets - 1))]
            start = len(rows)
            for group in row_groups:
                parameters = best_of(Bench(shape, group[0], weights), tried[shape, group[0]])
                rows += [row(Bench(shape, m, weights), name, parameters, card.bandwidth) for m in sorted(group)]
            rows += [row(Bench(shape, m, weights), name, None, card.bandwidth) for m in LIBRARY_ALONE]
            print_rows(rows[start:])
            torch.cuda.empty_cache()
    if not arguments.dry_run:
        write_csv(arguments.out, "linear_packed", rows, about_card(card))
        tuned = read_table(device)
        for op in ("linear_packed", "linear_silu_mul_packed"):
            tuned[op] = put(tuned.get(op, []), entries(rows, op))
        write_table(tuned, own_path(device))
    return 0


if __name__ == "__main__":
    sys.exit(main())
