"""Time whole decode steps of a model over several GPUs: the captured graphs that serve them, without the host.

    python kernels/bench_ranks.py [--models llama-3.1-8b] [--ranks 1,2] [--rows 1,32,256] [--ways peers,nccl]

As `bench_step.py`, whose models and rows these are; but the steps are launched in a row, since ranks that begin at
different times would wait for each other in what is measured.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench_reduce import seconds, spawn
from bench_step import DTYPE, capture, make_model, make_runner, profile, seat
from published_models import spec_of

from cb_backend.engine.runner.cuda_warm_up import log
from cb_backend.engine.runner.shard_runner import ShardRunner
from cb_backend.engine.runner.slot_runner import SlotRunner
from cb_backend.parallel.choose_group import choose_group
from cb_backend.parallel.group import Group, NoGroup
from cb_backend.parallel.torch_group import TorchGroup, join_group
from cb_backend.study.machine import conditions

WAYS = ("peers", "nccl")
MOST_ROWS = 2048  # of a sum over shared memory
STEPS = 30


@torch.inference_mode()
def tell_steps(name: str, group: Group, way: str, arguments: argparse.Namespace) -> None:
    """Of all rows, one number after the other."""
    if isinstance(group, TorchGroup):
        group = choose_group(group, MOST_ROWS, spec_of(name).hidden_size, DTYPE, log=log, is_peer_wanted=way == "peers")
    model = make_model(name, group=group)
    for num_rows in map(int, arguments.rows.split(",")):
        runner = make_runner(model, [arguments.context] * num_rows, ShardRunner if group.rank else SlotRunner)
        graph, _ = capture(runner, num_rows)
        seat(runner, [arguments.context] * num_rows)
        each = seconds(group, graph.replay, STEPS)
        if group.rank == 0:
            print(
                f"{name:14} ranks {group.size} {way if group.size > 1 else '':5} rows {num_rows:4} context"
                f" {arguments.context} {1e3 * each:8.3f} ms",
                flush=True,
            )
        if arguments.profile:
            profile(graph, 0 if group.rank else 18)
        del graph
        runner.close()
        del runner
        torch.cuda.empty_cache()


def run_rank(rank: int, arguments: argparse.Namespace, folder: str) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    torch.manual_seed(0)
    group: Group = NoGroup() if arguments.size == 1 else join_group(Path(folder), rank, arguments.size, device)
    for name in arguments.models.split(","):
        for way in arguments.ways.split(",") if arguments.size > 1 else ("",):
            tell_steps(name, group, way, arguments)
            torch.cuda.empty_cache()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="llama-3.1-8b")
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--rows", default="1,32,256")
    parser.add_argument("--context", type=int, default=640)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    for size in map(int, arguments.ranks.split(",")):
        if torch.cuda.device_count() < size:
            print(f"{torch.cuda.device_count()} CUDA devices, {size} are needed", file=sys.stderr)
            return 2
        arguments.size = size
        spawn(run_rank, arguments, size)
    print(" ".join(f"{key}={value}" for key, value in conditions("cuda").items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
