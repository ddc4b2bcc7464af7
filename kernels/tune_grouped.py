"""Find, per model and number of rows, the fastest products of experts, beside torch's grouped product.

    python kernels/tune_grouped.py [--models qwen3-30b-a3b] [--rows 1,8,64,256] [--quick] [--dry-run]

Rows go to random experts, as random weights route them: evenly, which reads the most weights. Each number of rows is
timed over several routings, so that few rows do not find their experts in L2. Rows of a block are chosen for both
products together; entries are for the rows of a block, the number of pairs and the shape. The floor reads the weights
of the experts that are hit once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import about_card, write_csv
from grouped_bench import OPS, Bench, Parameters, Weights
from published_models import OTHERS
from tuned_table import own_path, put, read_table, write_table

from cb_backend.kernels.compile_ahead import compile_ahead
from cb_backend.kernels.expert_plan import ExpertPlan
from cb_backend.kernels.launch import next_power_of_2, overriding
from cb_backend.layers.layer_spec import MoESpec
from cb_backend.study.machine import measure_card

TOLERANCE = 2e-2  # ||out - twin|| / ||twin||
# (block_n, block_k, num_warps, num_stages) by rows of a block
TILES: dict[int, tuple[tuple[int, int, int, int], ...]] = {
    16: ((32, 128, 4, 4), (32, 256, 4, 3), (64, 64, 4, 4), (64, 64, 4, 6), (64, 128, 4, 3), (64, 128, 4, 4),
         (64, 256, 4, 2), (128, 64, 4, 4), (128, 128, 8, 3)),
    32: ((64, 64, 4, 4), (64, 128, 4, 3), (64, 128, 8, 3), (128, 64, 4, 4), (128, 128, 8, 3)),
    64: ((64, 64, 4, 4), (64, 128, 4, 3), (128, 64, 4, 3), (128, 64, 8, 4), (128, 128, 8, 2)),
    128: ((64, 64, 4, 4), (64, 64, 8, 4), (128, 64, 8, 3), (128, 64, 8, 4)),
}  # fmt: skip
SPLITS = (1, 2, 4, 8)  # of the sums of packed weights' products with few rows
SPLIT_ROWS = 4  # with more there are programs enough
# The same with packed weights: (block_n, num_warps, num_stages)
PACKED_TILES: dict[int, tuple[tuple[int, int, int], ...]] = {
    16: ((64, 4, 4), (64, 4, 6), (128, 4, 4), (128, 8, 4)),
    32: ((64, 4, 4), (64, 4, 6), (128, 4, 4), (128, 8, 4)),
    64: ((64, 4, 4), (128, 4, 3), (128, 4, 4), (128, 8, 3)),
    128: ((64, 4, 3), (128, 4, 3), (128, 8, 2), (128, 8, 3)),
    256: ((128, 8, 2),),
}
QUICK = {16: (0, 1, 4, 7), 32: (0, 1), 64: (0, 3), 128: (1, 3)}  # places in TILES


def block_sizes(num_rows: int, spec: MoESpec, *, is_packed: bool) -> tuple[int, ...]:
    """Rows of a block that are tried for so many pairs an expert."""
    share = num_rows * spec.top_k / spec.num_experts
    if share > 192 and is_packed:  # weights are widened for each block: the fewer, the better
        return (128, 256)
    return (16,) if share <= 4 else (16, 32) if share <= 12 else (32, 64) if share <= 48 else (64, 128)


def candidates(block_m: int, num_rows: int, is_packed: bool, is_quick: bool) -> list[Parameters]:
    if is_packed:
        names = ("block_n", "num_warps", "num_stages")
        tiles = [dict(zip(names, tile, strict=True)) for tile in PACKED_TILES[block_m]]
        splits = SPLITS if num_rows <= SPLIT_ROWS else (1,)
        return [{**tile, **({"splits": count} if count > 1 else {})} for tile in tiles for count in splits]
    chosen = [TILES[block_m][place] for place in QUICK[block_m]] if is_quick else TILES[block_m]
    return [dict(zip(("block_n", "block_k", "num_warps", "num_stages"), tile, strict=True)) for tile in chosen]


def rehearse(benches: list[Bench], is_quick: bool) -> None:
    for bench in benches:
        for block_m in block_sizes(bench.num_rows, bench.weights.experts, is_packed=bench.weights.bits < 16):
            plans = bench.plans(block_m)
            for op in OPS:
                for parameters in candidates(block_m, bench.num_rows, bench.weights.bits < 16, is_quick):
                    with contextlib.suppress(Exception), overriding(op, parameters):  # `best` raises it again
                        bench.product(op, plans[0])


def best(bench: Bench, op: str, plans: list[ExpertPlan], is_quick: bool) -> tuple[float, Parameters]:
    found: list[tuple[float, Parameters]] = []
    for parameters in candidates(plans[0].block_m, bench.num_rows, bench.weights.bits < 16, is_quick):
        try:
            found.append((bench.seconds(op, plans, parameters), parameters))
        except Exception as error:  # too much shared memory: left out
            print(f"  {op} {plans[0].block_m} {parameters}: {type(error).__name__}: {error}"[:160], flush=True)
    for seconds, parameters in sorted(found, key=lambda each: each[0])[:3]:
        print(f"  {op:16} block_m {plans[0].block_m:3} {1e6 * seconds:8.1f} us {parameters}", flush=True)
    return min(found, key=lambda each: each[0])


def tune(bench: Bench, bandwidth: float, is_quick: bool) -> Iterator[dict[str, Any]]:
    """A row of results for each product at the best rows of a block."""
    spec, choices = bench.weights.experts, {}
    for block_m in block_sizes(bench.num_rows, spec, is_packed=bench.weights.bits < 16):
        plans = bench.plans(block_m)
        choices[block_m] = {op: best(bench, op, plans, is_quick) for op in OPS}
        with contextlib.ExitStack() as stack:
            for op, (_, parameters) in choices[block_m].items():
                stack.enter_context(overriding(op, parameters))
            if not (error := bench.check(plans[0])) < TOLERANCE:
                raise ValueError(f"{bench.num_rows} rows in blocks of {block_m}: relative error {error:.3g}")
    block_m = min(choices, key=lambda each: sum(seconds for seconds, _ in choices[each].values()))
    for op, (seconds, parameters) in choices[block_m].items():
        n, k = bench.weights.shape(op)
        rows = 2 * n if op == "grouped_gate_up" else n
        yield {
            "op": op, "model": bench.weights.model, "n": n, "k": k, "e": spec.num_experts, "rows": bench.num_rows,
            "m": block_m, "bits": bench.weights.bits, "pairs": next_power_of_2(bench.num_rows * spec.top_k),
            "distinct": round(bench.distinct, 1),
            "torch_us": round(1e6 * bench.torch_seconds(op), 2), "us": round(1e6 * seconds, 2),
            "floor_us": round(1e6 * bench.weights.bytes_per_weight * bench.distinct * rows * k / bandwidth, 2),
            "parameters": " ".join(f"{key}={value}" for key, value in parameters.items()),
        }  # fmt: skip


def entries(rows: list[dict[str, Any]], op: str) -> list[dict[str, Any]]:
    """The table of an op: what `launch_parameters` reads."""
    if op == "plan_experts":
        share: Callable[[dict[str, Any]], int] = lambda row: next_power_of_2(-(-row["pairs"] // row["e"]))  # noqa: E731
        return [{"when": {"e": row["e"], "m": share(row), "bits": row["bits"]}, "use": {"block_m": row["m"]}}
            for row in rows if row["op"] == "grouped_gate_up"]  # fmt: skip
    return [
        {
            "when": {name: row[name] for name in ("n", "k", "e", "m", "pairs", "bits")},
            "use": {name: int(value) for name, _, value in (p.partition("=") for p in row["parameters"].split())},
        }
        for row in rows
        if row["op"] == op
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="qwen3-30b-a3b", help=f"with experts, of {', '.join(OTHERS)}")
    parser.add_argument("--rows", default="1,2,4,8,16,32,64,128,256,1024,4096")
    parser.add_argument("--quick", action="store_true", help="fewer candidates")
    parser.add_argument("--dry-run", action="store_true", help="print, do not write")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    card = measure_card("cuda", "bfloat16") if torch.cuda.is_available() else None
    if card is None:
        print("no CUDA device, or none with memory left: launch parameters are found on their GPU", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    for model in arguments.models.split(","):
        weights = Weights(model)
        benches = [Bench(weights, num_rows) for num_rows in map(int, arguments.rows.split(","))]
        compile_ahead(lambda benches=benches: rehearse(benches, arguments.quick))  # type: ignore[misc]
        for bench in benches:
            for row in tune(bench, card.bandwidth, arguments.quick):
                rows.append(row)
                print(" ".join(f"{name} {value}" for name, value in row.items() if name != "pairs"), flush=True)
    tuned = read_table(torch.device("cuda", torch.cuda.current_device()))
    for op in ("plan_experts", *OPS):
        found = entries(rows, op)
        tuned[op] = put(tuned.get(op, []), found)
        print(*(f"{op} {json.dumps(entry)}" for entry in found), sep="\n")
    if not arguments.dry_run:
        write_csv(arguments.out, "grouped_linear", rows, about_card(card))
        write_table(tuned, own_path(torch.device("cuda", torch.cuda.current_device())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
