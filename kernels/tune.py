"""Find launch parameters on this GPU and write them to `cb_backend/kernels/tuned/<gpu>.json`.

    python kernels/tune.py [attention] [--quick] [--ops decode_attention,prefill_attention] [--dry-run]
    python kernels/tune.py linear [--quick] [--models llama-3.2-1b] [--rows 256] [--dry-run]    # see tune_linear.py
    python kernels/tune.py steps [--models llama-3.2-1b] [--rows 1,8] [--seconds 120] [--dry-run]   # see tune_steps.py
    python kernels/tune.py attention-steps [--rows 32,64] [--dry-run]                     # see tune_attention_steps.py
    python kernels/tune.py lora [--models llama-3.1-8b] [--rows 1,8,32] [--dry-run]       # see tune_lora.py

For each op and head size every combination of a small grid is timed on cases that stand for serving, and the one with
the least geometric mean of time per unit of work wins. Variants are compiled first, by several processes at once, into
Triton's cache on disk. A variant that fails is reported and left out.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import time_graph
from cases import CACHE_BYTES, Launch, make_decode, make_prefill
from roofline import MODELS, decode_attention, prefill_attention
from tuned_table import Table, is_by_steps, own_path, put, read_table, replace, write_table

from cb_backend.kernels.launch import launch_parameters, overriding

Parameters = dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Target:
    """One entry to find: an op under one condition, on some cases, over a grid."""

    op: str
    when: dict[str, int]
    cases: tuple[tuple[Any, ...], ...]  # arguments of `make`, and of nothing else
    compiled: dict[str, tuple[int, ...]]  # parameters that need a compilation each
    planned: dict[str, tuple[int, ...]]  # parameters tried after those, at the best of them

    def grid(self, values: dict[str, tuple[int, ...]]) -> Iterator[Parameters]:
        for combination in itertools.product(*values.values()):
            yield dict(zip(values, combination, strict=True))


def targets(is_quick: bool) -> list[Target]:
    """What is tuned. The cases are the shapes a served batch has: few rows, many, long contexts."""
    # By the rows' next power of two: rows and contexts. Few rows leave most of the card idle, many are one long stream.
    decode: dict[int, tuple[tuple[int, int], ...]] = {
        1: ((1, 640),), 2: ((2, 640),), 4: ((3, 640),), 8: ((8, 640),), 16: ((16, 640),), 32: ((24, 640), (32, 640)),
        64: ((48, 640), (64, 640)), 128: ((96, 640), (128, 640)), 256: ((192, 640), (256, 640)), 512: ((384, 640),),
    }  # fmt: skip
    # Many programs, or too few to share multiprocessors (see prefill_attention).
    prefill: list[tuple[tuple[int, ...], ...]] = [
        ((1, 4096, 4096), (8, 1024, 1024)),
        ((1, 1024, 1024), (1, 512, 4096)),
    ]
    if not is_quick:
        decode = {m: (*cases, (cases[0][0], 2048)) for m, cases in decode.items()}
        prefill[0] += ((1, 2048, 2048), (1, 8192, 8192), (32, 128, 128))
    found = []
    tiles = {
        "block_m": (128, 256),
        "block_n": (64, 128),
        "num_warps": (8, 16),
        "num_stages": (2, 3),
        "max_registers": (128, 255),
    }
    for head_dim, models in ((128, ("qwen3-0.6b", "llama-3.1-8b")), (64, ("llama-3.2-1b",))):
        found += [
            Target(
                op="decode_attention",
                when={"block_d": head_dim, "kv_bytes": 2, "m": m},
                cases=tuple((model, *sizes, 16) for model in models for sizes in cases),
                compiled={"block_n": (32, 64, 128), "num_warps": (2, 4), "num_stages": (2, 3, 4)},
                planned={"ctas_per_sm": (1, 2, 3, 4, 6), "min_split": (64, 128, 256)},
            )
            for m, cases in decode.items()
        ]
        found += [
            Target(
                op="prefill_attention",
                when={"block_d": head_dim, "is_small": is_small, "q_bytes": 2},
                cases=tuple((models[-1], *sizes, 16) for sizes in prefill[is_small]),
                compiled=tiles,
                planned={},
            )
            for is_small in (0, 1)
        ]
    return found


def make_launches(op: str, case: tuple[Any, ...]) -> tuple[list[Launch], float]:
    """Input sets of a case, too large together for an L2 cache, and the bytes or FLOP its time is held against."""
    shape = MODELS[case[0]]
    if op == "decode_attention":
        num_bytes = decode_attention(shape, case[1], case[2]).num_bytes
        return [make_decode(*case) for _ in range(min(24, max(1, int(CACHE_BYTES // num_bytes))))], num_bytes
    return [make_prefill(*case)], prefill_attention(shape, *case[1:4]).flops


def measure(target: Target, cases: list[tuple[list[Launch], float]], parameters: Parameters) -> float:
    """Geometric mean over the cases of seconds per unit of work, at these parameters."""
    logs = []
    with overriding(target.op, parameters):
        for launches, work in cases:
            rounds = -(-8 // len(launches))

            def launch_all(launches: list[Launch] = launches, rounds: int = rounds) -> int:
                plans: dict[int, torch.Tensor] = {}
                for _ in range(rounds):
                    for launch in launches:
                        launch.kernel(plans)
                return rounds * len(launches)

            logs.append(math.log(time_graph(launch_all) / work))
    return math.exp(sum(logs) / len(logs))


def compile_one(job: tuple[str, tuple[Any, ...], Parameters]) -> str:
    """Runs in a helper process: one launch, which leaves the compiled variant on disk. Returns an error or nothing."""
    op, case, parameters = job
    small = (case[0], min(case[1], 2), *case[2:])  # few rows; sizes that choose a variant of the code stay
    try:
        with overriding(op, parameters):
            make_launches(op, small)[0][0].kernel({})
        torch.cuda.synchronize()
    except Exception as exception:  # too much shared memory, a failing compilation: the variant is left out
        return f"{op} {parameters}: {type(exception).__name__}: {exception}".splitlines()[0][:160]
    return ""


def tune(target: Target) -> tuple[Parameters, float, float]:
    """(the best parameters, its measure, the measure of those now in use)."""
    cases = [make_launches(target.op, case) for case in target.cases]
    now = dict(launch_parameters(target.op, torch.device("cuda", 0), **target.when))
    best, best_cost = now, measure(target, cases, now)
    now_cost = best_cost
    for values in (target.compiled, target.planned):
        for parameters in target.grid(values):
            candidate = {**best, **parameters} if values is target.planned else {**now, **parameters}
            try:
                cost = measure(target, cases, candidate)
            except Exception as exception:  # as in compile_one
                print(f"  left out {parameters}: {type(exception).__name__}", flush=True)
                continue
            if cost < best_cost:
                best, best_cost = candidate, cost
    torch.cuda.empty_cache()
    return best, best_cost, now_cost


def tune_linear_products(arguments: argparse.Namespace) -> int:
    import tune_linear  # its helper processes import it by name

    found = tune_linear.run(arguments)
    if not arguments.dry_run:
        device = torch.device("cuda", torch.cuda.current_device())
        path, table = own_path(device), read_table(device)
        for op, entries in found.items():
            table[op] = replace(
                table.get(op, []),
                entries,
                lambda entry: tune_linear.is_of(entry, arguments),
                keeps_steps=not arguments.replace_steps,
            )
        write_table(table, path)
        print(path.read_text())
    return 0


def chosen_in_steps(table: Table) -> list[tuple[str, dict[str, int]]]:
    """(op, conditions) of the entries that `tune` leaves."""
    return [(op, entry["when"]) for op, entries in table.items() for entry in entries if is_by_steps(entry)]


def tune_in_steps(
    run: Callable[[argparse.Namespace, Callable[[Table], None]], None], arguments: argparse.Namespace
) -> int:
    """What `run` finds goes into the table as it is found."""
    device = torch.device("cuda", torch.cuda.current_device())

    def save(found: Table) -> None:
        if arguments.dry_run:
            print(json.dumps(found), flush=True)
            return
        table = read_table(device)
        write_table(
            {**table, **{op: put(table.get(op, []), entries) for op, entries in found.items()}}, own_path(device)
        )

    run(arguments, save)
    return 0


IN_STEPS = {"steps": "tune_steps", "attention-steps": "tune_attention_steps", "lora": "tune_lora"}  # modules here


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="?", choices=["attention", "linear", *IN_STEPS], default="attention")
    parser.add_argument("--quick", action="store_true", help="a small grid")
    parser.add_argument("--ops", default="decode_attention,prefill_attention")
    parser.add_argument("--models", default=",".join(MODELS), help="of linear and both kinds of steps: whose")
    parser.add_argument(
        "--rows",
        help="of linear: only the groups that begin with these numbers of rows: 1,256; of steps: a step's",
    )
    parser.add_argument(
        "--seconds", type=float, default=120, help="of steps: how long to search a model, or those of a head size"
    )
    parser.add_argument("--context", type=int, default=640, help="of steps: of every row")
    parser.add_argument(
        "--replace-steps", action="store_true", help="of attention and linear: entries chosen in whole steps too"
    )
    parser.add_argument("--dry-run", action="store_true", help="print, do not write")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: launch parameters are found on the GPU they are for", file=sys.stderr)
        return 2
    if arguments.what == "linear":
        return tune_linear_products(arguments)
    if arguments.what in IN_STEPS:
        return tune_in_steps(importlib.import_module(IN_STEPS[arguments.what]).run, arguments)
    device = torch.device("cuda", torch.cuda.current_device())
    kept = [] if arguments.replace_steps else chosen_in_steps(read_table(device))
    chosen = [
        target
        for target in targets(arguments.quick)
        if target.op in arguments.ops.split(",") and (target.op, target.when) not in kept
    ]
    jobs = {  # one a model: its other cases compile to the same
        (target.op, case[0], *parameters.values()): (
            target.op, case, {**launch_parameters(target.op, device, **target.when), **parameters}
        )
        for target in chosen
        for case in target.cases
        for parameters in target.grid(target.compiled)
    }  # fmt: skip
    started = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(max(1, min(12, (os.cpu_count() or 2) - 2))) as pool:
        errors = [error for error in pool.imap_unordered(compile_one, jobs.values()) if error]
    print(f"compiled {len(jobs)} variants in {time.perf_counter() - started:.0f} s", *errors, sep="\n  ", flush=True)
    found, lines = [], []
    for target in chosen:
        best, best_cost, now_cost = tune(target)
        found.append((target, best))
        lines.append(f"{target.op} {target.when}: {best} ({now_cost / best_cost:.2f} times as fast as before)")
    path = own_path(device)
    if not arguments.dry_run:
        table = read_table(device)
        for target, parameters in found:
            table[target.op] = put(table.get(target.op, []), [{"when": target.when, "use": parameters}])
        write_table(table, path)
    print(*lines, path.read_text() if path.is_file() else "nothing written", sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
