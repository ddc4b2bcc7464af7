"""What it takes ranks to add up, over memory that they share and with NCCL, and whether both give the same bits.

    python kernels/bench_reduce.py [--ranks 2] [--rows 1,64,256,2048] [--hidden-size 4096] [--checked 100000]

Each sum is a layer's: partial sums of all ranks, the residual stream and the norm behind. Times are of sums in a
captured graph, 64 a replay, replays in a row. `link` is what a copy out of another GPU's memory moves.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cb_backend.layers.layer_spec import NormSpec
from cb_backend.layers.norm import Junction, RMSNorm
from cb_backend.layers.ops import resolve_ops
from cb_backend.parallel.choose_group import choose_group
from cb_backend.parallel.group import Agreed
from cb_backend.parallel.peer_group import PeerGroup
from cb_backend.parallel.torch_group import TorchGroup, join_group
from cb_backend.study.machine import conditions

DTYPE = torch.bfloat16
SUMS = 64  # a step
REPLAYS = 20
LINK_BYTES = 256 << 20


class Steps:
    """Steps of nothing but sums, each of which takes what the one before gave."""

    def __init__(self, group: TorchGroup, junction: Junction, rows: int, hidden_size: int) -> None:
        self.group, self.junction = group, junction
        generator = torch.Generator(group.device).manual_seed(1000 * group.rank + rows)
        self.x = torch.randn(rows, hidden_size, device=group.device, generator=generator).to(DTYPE)
        self.slots = torch.zeros(0, dtype=torch.int32, device=group.device)

    def run(self, num_sums: int = SUMS) -> Tensor:
        self.group.share_tokens(self.slots, self.slots, self.slots)
        x, residual = self.x, torch.zeros_like(self.x)
        for _ in range(num_sums):
            x, residual = self.group.reduce_add_norm(x, residual, self.junction)
            x = x + self.x  # of every rank another one
        return residual

    def captured(self) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        self.run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            out = self.run()
        return graph, out


def seconds(group: TorchGroup, launch: Callable[[], object], times: int = REPLAYS) -> float:
    """Of one of several in a row, which all ranks launch."""
    for _ in range(3):
        launch()
    torch.cuda.synchronize()
    group.agree(0, Agreed.LEAST)
    start = time.perf_counter()
    for _ in range(times):
        launch()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / times


def tell_sums(nccl: TorchGroup, peers: TorchGroup, rows: int, hidden_size: int, say: Callable[[str], None]) -> None:
    junction = new_junction(hidden_size, nccl.device)
    parts, bits = [], []
    for group in (nccl, peers) if isinstance(peers, PeerGroup) else (nccl,):
        steps = Steps(group, junction, rows, hidden_size)
        graph, out = steps.captured()
        each = seconds(group, graph.replay) / SUMS
        bits.append(out.clone())
        bits.append(steps.run())
        parts.append(f"{type(group).__name__} {1e6 * each:7.2f} us")
    is_equal = all(torch.equal(bits[0], other) for other in bits[1:])
    say(f"rows {rows:5} {rows * hidden_size * DTYPE.itemsize >> 10:6} KiB  {'  '.join(parts)}  same bits: {is_equal}")


def check(nccl: TorchGroup, peers: TorchGroup, num_sums: int, hidden_size: int) -> int:
    """Steps of 8 rows whose bits are not those of NCCL, of so many sums in all."""
    junction, wrong = new_junction(hidden_size, nccl.device), torch.zeros((), dtype=torch.int64, device=nccl.device)
    ours, theirs = (Steps(group, junction, 8, hidden_size) for group in (peers, nccl))
    expected = theirs.run()
    graph, out = ours.captured()
    for _ in range(num_sums // SUMS):
        graph.replay()
        wrong += (out != expected).any()
    return int(wrong)


def new_junction(hidden_size: int, device: torch.device) -> Junction:
    norm = RMSNorm("norm", NormSpec(eps=1e-5), hidden_size, dtype=DTYPE, device=device)
    norm.weight.fill_(1)
    return Junction(resolve_ops("triton"), NormSpec(eps=1e-5), leaving=norm, joining=None)


def tell_link(group: TorchGroup, say: Callable[[str], None]) -> None:
    """Between torch's own tensors of two GPUs of one process, as far as the driver lets them."""
    other = torch.device("cuda", (group.rank + 1) % group.size)
    if group.rank == 0:
        here, there = (torch.zeros(LINK_BYTES, dtype=torch.uint8, device=each) for each in (group.device, other))
        torch.cuda.synchronize(other)
        here.copy_(there)
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(REPLAYS):
            here.copy_(there, non_blocking=True)
        torch.cuda.synchronize()
        torch.cuda.synchronize(other)
        rate = LINK_BYTES * REPLAYS / (time.perf_counter() - start)
        say(f"link: peer access {torch.cuda.can_device_access_peer(group.device, other)}, {rate / 1e9:.0f} GB/s")
    group.agree(0, Agreed.LEAST)


def run_rank(rank: int, arguments: argparse.Namespace, folder: str) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)

    def say(line: str) -> None:
        if rank == 0:
            print(line, flush=True)

    nccl = join_group(Path(folder), rank, arguments.ranks, device)
    rows = [int(each) for each in arguments.rows.split(",")]
    peers = choose_group(nccl, max(rows), arguments.hidden_size, DTYPE, log=say)
    tell_link(nccl, say)
    with torch.inference_mode():
        for each in rows:
            tell_sums(nccl, peers, each, arguments.hidden_size, say)
        if arguments.checked:
            wrong = check(nccl, peers, arguments.checked, arguments.hidden_size)
            say(f"{arguments.checked} sums of 8 rows, steps with other bits than NCCL's: {wrong}")
    if peers.fault() is not None:
        print(f"rank {rank}: {peers.fault()}", flush=True)
    nccl.agree(0, Agreed.LEAST)
    nccl.leave()


def spawn(work: Callable[..., Any], arguments: argparse.Namespace, size: int) -> None:
    """`work(rank, arguments, folder)` in a process each; the folder is theirs."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (arguments, folder), nprocs=size)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", default="1,8,64,256,2048")
    parser.add_argument("--hidden-size", type=int, default=4096)
    parser.add_argument("--checked", type=int, default=0, help="sums whose bits are compared")
    arguments = parser.parse_args()
    if torch.cuda.device_count() < arguments.ranks:
        print(f"{torch.cuda.device_count()} CUDA devices, {arguments.ranks} are needed", file=sys.stderr)
        return 2
    spawn(run_rank, arguments, arguments.ranks)
    print(" ".join(f"{key}={value}" for key, value in conditions("cuda").items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
