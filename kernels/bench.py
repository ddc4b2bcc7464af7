"""Measure the kernels on this GPU: each case's time, its share of the card's measured limit, and its twin beside it.

    python kernels/bench.py decode_attention [--models qwen3-0.6b,llama-3.1-8b] [--quick] [--peers FILE]
    python kernels/bench.py all --quick

A case is a CUDA graph of launches over several input sets; the time of a launch is the median replay over their number.
Every case is compared with its twin first. A case that fails is reported and the rest goes on; the exit code tells.
Results go to `results/<op>.csv` with card and versions. `--peers` reads lines `MICRO {json}` of another attention's
benchmark (peer, kind, model, batch, ctx, us) and prints its `fa3` times in a column.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cases import OPS, Case, cases_of
from roofline import MODELS

from cb_backend.study.machine import conditions, measure_card
from cb_backend.study.roofline import CardLimits

REPLAYS = 5
MIN_LAUNCHES = 8  # in a graph
TOLERANCE = 2e-2  # ||out - twin|| / ||twin|| in bf16
Peers = dict[tuple[str, str, int, int], float]


def time_graph(launch_all: Callable[[], int]) -> float:
    """Seconds of one launch of those `launch_all` makes (it returns their number): median of graph replays."""
    launch_all()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        num_launches = launch_all()
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / num_launches)
    return statistics.median(times)


def time_case(case: Case) -> tuple[float, float, float]:
    """(seconds of a kernel launch, seconds of the twin, relative error). Raises `ValueError` if they disagree."""
    launches = [case.make() for _ in range(case.num_sets)]
    first = launches[0]
    error = relative_error(first.compared(first.kernel({})), first.compared(first.twin()))
    if not error < TOLERANCE:
        raise ValueError(f"kernel and twin disagree: relative error {error:.3g}")
    rounds = -(-MIN_LAUNCHES // len(launches))

    def launch_all() -> int:
        plans: dict[int, torch.Tensor] = {}
        for _ in range(rounds):
            for launch in launches:
                launch.kernel(plans)
        return rounds * len(launches)

    seconds = time_graph(launch_all)
    torch.cuda.synchronize()
    start = time.perf_counter()
    first.twin()
    torch.cuda.synchronize()
    return seconds, time.perf_counter() - start, error


def relative_error(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    """The largest ||found - wanted|| / ||wanted||; of whole numbers, the share that differs (NaN never passes)."""
    errors = []
    for a, b in zip(found, wanted, strict=True):
        if a.dtype.is_floating_point:
            errors.append(float((a.float() - b.float()).norm() / b.float().norm().clamp(min=1e-20)))
        else:
            errors.append(float((a != b).float().mean()))
    return max(errors, key=lambda error: float("inf") if error != error else error)


def compile_ahead(ops: list[str], models: list[str], is_quick: bool) -> None:
    """Compile what the cases need into Triton's cache on disk, several processes at once."""
    jobs = list(dict.fromkeys((c.op, c.model, c.variant) for op in ops for c in cases_of(op, models, is_quick)))
    num_processes = max(1, min(12, len(jobs), (os.cpu_count() or 2) - 2))
    with multiprocessing.get_context("spawn").Pool(num_processes) as pool:
        pool.starmap(_compile_one, [(*job, is_quick) for job in jobs], chunksize=1)


def _compile_one(op: str, model: str, variant: str, is_quick: bool) -> None:
    """In a helper process: one launch of the smallest case. What fails here fails, and is reported, in its case."""
    case = next(case for case in cases_of(op, [model], is_quick) if case.variant == variant)
    with contextlib.suppress(Exception):
        case.make().kernel({})
        torch.cuda.synchronize()


def run_case(case: Case, card: CardLimits, peers: Peers) -> dict[str, Any]:
    """One row of the table; a failure is a row with `error` set."""
    row: dict[str, Any] = {"op": case.op, "model": case.model, "case": case.label}
    try:
        seconds, twin_seconds, error = time_case(case)
    except Exception as exception:  # a case that fails must not take the rest along
        row["error"] = f"{type(exception).__name__}: {exception}".splitlines()[0][:160]
        return row
    finally:
        torch.cuda.empty_cache()
    return row | {
        "us": round(1e6 * seconds, 2),
        "floor_us": round(1e6 * case.work.seconds(card), 2),
        "share_of_limit": round(case.work.seconds(card) / seconds, 3),
        "gb_s": round(case.work.num_bytes / seconds / 1e9, 1),
        "tflop_s": round(case.work.flops / seconds / 1e12, 1),
        "bytes": int(case.work.num_bytes),
        "twin_us": round(1e6 * twin_seconds),
        "relative_error": float(f"{error:.2g}"),
        "fa3_us": peers.get(case.peer, "") if case.peer else "",
        "error": "",
    }


def read_peers(path: Path | None) -> Peers:
    """Microseconds of FlashAttention-3 by (kind, model, batch, context), out of lines that begin with MICRO."""
    if path is None:
        return {}
    lines = [line.partition("MICRO ")[2] for line in path.read_text().splitlines() if "MICRO {" in line]
    records = [json.loads(line) for line in lines]
    return {(r["kind"], r["model"], r["batch"], r["ctx"]): r["us"] for r in records if r["peer"] == "fa3"}


def print_rows(rows: list[dict[str, Any]]) -> None:
    print(
        f"{'op':17} {'model':12} {'case':42} {'us':>9} {'floor':>9} {'share':>6} {'GB/s':>6} {'TF/s':>6} {'fa3 us':>8}"
    )
    for row in rows:
        start = f"{row['op']:17} {row['model']:12} {row['case']:42}"
        if row["error"]:
            print(f"{start} FAILED {row['error']}")
            continue
        print(
            f"{start} {row['us']:9.1f} {row['floor_us']:9.1f} {row['share_of_limit']:6.1%}"
            f" {row['gb_s']:6.0f} {row['tflop_s']:6.0f} {row['fa3_us']:>8}"
        )


def about_card(card: CardLimits) -> dict[str, Any]:
    """What stands beside every row of a results file: the card as measured now, driver, versions, commit."""
    about = conditions("cuda")
    names = ("driver", "torch", "triton", "commit")
    return {"gpu": about["card"], **{name: about[name] for name in names}, "copy_gb_s": round(card.bandwidth / 1e9)}


def write_csv(folder: Path, op: str, rows: list[dict[str, Any]], about: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rows = [row | about for row in rows]
    names = list(dict.fromkeys(name for row in rows for name in row))
    with (folder / f"{op}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, names, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("op", choices=[*OPS, "all"])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--quick", action="store_true", help="fewer sizes")
    parser.add_argument("--peers", type=Path, help="MICRO lines of another attention's benchmark")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: the kernels are measured on a GPU", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    card = measure_card("cuda", "bfloat16")
    if card is None:
        print("no memory left on the GPU to measure its limits", file=sys.stderr)
        return 2
    torch.cuda.empty_cache()
    about = about_card(card) | {"matmul_tflop_s": round(card.flops / 1e12)}
    peers, all_rows = read_peers(arguments.peers), []
    ops, models = list(OPS) if arguments.op == "all" else [arguments.op], arguments.models.split(",")
    started = time.perf_counter()
    compile_ahead(ops, models, arguments.quick)
    print(f"compiled in {time.perf_counter() - started:.1f} s", flush=True)
    for op in ops:
        started = time.perf_counter()
        rows = [run_case(case, card, peers) for case in cases_of(op, models, arguments.quick)]
        write_csv(arguments.results, op, rows, about)
        all_rows += rows
        print(f"{op}: {len(rows)} cases in {time.perf_counter() - started:.1f} s", flush=True)
    print_rows(all_rows)
    print(" ".join(f"{name}={value}" for name, value in about.items()))
    return 1 if any(row["error"] for row in all_rows) else 0


if __name__ == "__main__":
    sys.exit(main())
