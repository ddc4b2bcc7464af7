"""Ranks as processes that share memory of files, with the kernel interpreted: `python -m tests.parallel.peer_ranks`.

Each adds up sums of several steps over that memory and by torch.distributed, and prints how many have the same bits.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from cb_backend.layers.layer_spec import NormSpec
from cb_backend.layers.norm import Junction, RMSNorm
from cb_backend.layers.ops import resolve_ops
from cb_backend.parallel.choose_group import choose_group
from cb_backend.parallel.peer_group import PeerMemory
from cb_backend.parallel.torch_group import join_group

CPU = torch.device("cpu")
MAX_ROWS, HIDDEN, STEPS, SUMS = 4, 32, 3, 5


def open_files(folder: Path) -> object:
    """Memory of the ranks in files of this folder, which all map."""

    def open_memory(processes: dist.ProcessGroup, num_bytes: int, device: torch.device) -> PeerMemory:
        paths = [folder / f"memory{rank}" for rank in range(processes.size())]
        for path in paths:
            with path.open("ab") as file:
                file.truncate(num_bytes)
        ranks = [torch.from_file(str(path), shared=True, size=num_bytes, dtype=torch.uint8) for path in paths]
        return PeerMemory(ranks[processes.rank()], tuple(ranks))

    return open_memory


def junction() -> Junction:
    norms = []
    for name in ("leaving", "joining"):
        norm = RMSNorm(name, NormSpec(eps=1e-5), HIDDEN, dtype=torch.float32, device=CPU)
        norm.weight.copy_(torch.linspace(0.5, 1.5, HIDDEN))
        norms.append(norm)
    return Junction(resolve_ops("triton"), NormSpec(eps=1e-5), leaving=norms[0], joining=norms[1], scale=0.5)


def draw(rank: int, seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * rank + seed))


def main(folder: Path, rank: int, size: int) -> None:
    group = join_group(folder, rank, size, CPU)
    told: list[str] = []
    peers = choose_group(group, MAX_ROWS, HIDDEN, torch.float32, log=told.append, open_memory=open_files(folder))
    join, equal = junction(), []
    for step in range(STEPS):
        nothing = torch.zeros(0, dtype=torch.int32)
        peers.share_tokens(nothing, nothing, nothing)
        for place in range(SUMS):
            seed = SUMS * step + place
            rows = 1 + seed % (MAX_ROWS + 2)  # of the last ones there is no room for
            x = draw(rank, seed, rows, 3, HIDDEN) if place == 2 else draw(rank, seed, rows, HIDDEN)
            residual = draw(99, seed, rows, HIDDEN)
            out = peers.partial_out(rows)
            if x.dim() == 2 and place % 2 and out is not None:
                found = peers.reduce_add_norm(out.copy_(x), residual, join)  # a product that was written there
            else:
                found = peers.reduce_add_norm(x, residual, join)
            wanted = group.reduce_add_norm(x if x.dim() == 2 else x.sum(1), residual, join)
            equal.append(all(torch.equal(*pair) for pair in zip(found, wanted, strict=True)))
    print(type(peers).__name__, sum(equal), len(equal), *told, sep="|", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
