"""Ranks of a group as threads of the test's process, over gloo: nothing to start, and what one raises is seen."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from cb_backend.parallel.group import Agreed
from cb_backend.parallel.torch_group import TorchGroup

TIMEOUT_S = 60.0  # of a collective that a rank does not come to
Result = TypeVar("Result")


def on_ranks(size: int, work: Callable[[TorchGroup], Result]) -> list[Result]:
    """What `work` returns on each rank of a group of so many, in their order. Raises what the first rank raised."""
    store = dist.HashStore()

    def run(rank: int) -> Result:
        torch.set_num_threads(1)
        timeout = timedelta(seconds=TIMEOUT_S)
        processes = dist.ProcessGroupGloo(dist.PrefixStore("group", store), rank, size, timeout)
        group = TorchGroup(processes, torch.device("cpu"))
        result = work(group)
        with contextlib.suppress(RuntimeError):  # one of the others failed
            group.agree(0, Agreed.LEAST)  # nobody goes while others have yet to come
        return result

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
        return [future.result() for future in futures]
