"""Decode steps by how much shared memory decode attention asks for. For a GPU host.

    python kernels/bench_carveout.py --models llama-3.2-1b --rows 1,8,64,256 [--percent 12,25,43,57,71,85,100]

Each step is recorded and timed with the driver's own choice, with the rule's (`cb_backend.kernels.carveout`), with each
percentage of what a multiprocessor can have, and with the driver's again: how far those two are apart is the noise.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench_step import capture, make_model, make_runner, record, seat, time_step

from cb_backend.engine.runner.slot_runner import SlotRunner
from cb_backend.engine.runner.step_buffers import StepBuffers
from cb_backend.kernels import carveout
from cb_backend.study.machine import conditions

DRIVERS = -1  # of CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT: the driver chooses
ROUNDS = 3


@contextlib.contextmanager
def asking_for(percent: int | None) -> Iterator[None]:
    """Let attention ask for this much, wherever it is launched meanwhile. None: for what the rule says."""
    if percent is None:
        yield
        return
    with patch.object(carveout, "carveout", lambda *_: percent), patch.object(carveout, "prefer", _prefer):
        yield


def _prefer(function: int, percent: int, prefer: Callable[[int, int], bool] = carveout.prefer) -> bool:
    if not prefer(function, percent):
        raise RuntimeError(f"the driver does not take a carveout of {percent} %")
    return True


@torch.inference_mode()
def seconds_at(percent: int | None, runner: SlotRunner, buffers: StepBuffers, lengths: list[int]) -> float:
    """Of a step that is recorded anew: a graph keeps what its launches had, and `record` takes a step before, in which
    they are asked for.
    """
    with asking_for(percent):
        seat(runner, lengths)
        graph = record(runner, buffers)
    times = []
    for _ in range(ROUNDS):
        seat(runner, lengths)
        times.append(time_step(graph))
    return min(times)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="llama-3.2-1b,qwen3-0.6b,llama-3.1-8b")
    parser.add_argument("--rows", default="1,8,64,256")
    parser.add_argument("--context", type=int, default=640)
    parser.add_argument("--percent", default="12,25,43,57,71,85,100")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: steps are timed on a GPU", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    tried = [DRIVERS, None, *map(int, arguments.percent.split(",")), DRIVERS]
    names = [{DRIVERS: "driver", None: "rule"}.get(percent, f"{percent} %") for percent in tried]
    print(f"{'ms a step':14} rows", *(f"{name:>8}" for name in names))
    for model_name in arguments.models.split(","):
        model = make_model(model_name)
        for num_rows in map(int, arguments.rows.split(",")):
            lengths = [arguments.context] * num_rows
            runner = make_runner(model, lengths)
            graph, buffers = capture(runner, num_rows)
            del graph
            times = [seconds_at(percent, runner, buffers, lengths) for percent in tried]
            print(f"{model_name:14} {num_rows:4}", *(f"{1e3 * seconds:8.4f}" for seconds in times), flush=True)
            runner.close()
            del runner, buffers
            torch.cuda.empty_cache()
        del model
        gc.collect()
        torch.cuda.empty_cache()
    print(" ".join(f"{name}={value}" for name, value in conditions("cuda").items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
