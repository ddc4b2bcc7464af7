"""A group over torch.distributed: gloo between CPUs, NCCL between GPUs.

Sums are gathered, not reduced: every rank adds the parts up itself, in the order of ranks, so that all have the same
bits whatever way the library would have reduced them. What is agreed while ranks start goes over the hosts' processes
on GPUs too: there a rank that is gone is noticed, while a device would wait for it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cb_backend.parallel.group import Addition, Agreed

LEAVE_TIMEOUT_S = 10.0
START_TIMEOUT_S = 600.0  # for all ranks to come: each loads its shard first, at the speed of the slowest disk
# Multicast is one more way to fail where devices are lent to containers, and nothing here needs it. And whoever watches
# the ranks says why one is gone, and ends the process; torch would end it before, or ask for news in the ranks' file,
# and wait for minutes for that when it is gone.
_SETTINGS = {
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}  # fmt: skip

logger = logging.getLogger("cb_backend.engine")


class TorchGroup:
    """Implements `Group` with the collectives of a process group."""

    def __init__(
        self, processes: dist.ProcessGroup, device: torch.device, hosts: dist.ProcessGroup | None = None
    ) -> None:
        """device: where the tensors of all calls lie. hosts: the same ranks, over CPUs; None: `processes` are."""
        self.rank = processes.rank()
        self.size = processes.size()
        self.device = device
        self.processes = processes
        self.hosts = hosts or processes

    def reduce_add_norm(self, x: Tensor, residual: Tensor, junction: Addition) -> tuple[Tensor, Tensor]:
        # The addition sums parts in float32, the ranks' parts as those of experts.
        parts = x if x.dim() == 3 else x.unsqueeze(1)  # [num_tokens, num_parts, hidden_size]
        every = self._gathered(parts).transpose(0, 1).flatten(1, 2)  # a view, where there is one part a rank
        return junction.add(every.contiguous(), residual)

    def partial_out(self, num_rows: int) -> Tensor | None:
        return None

    def sum_rows(self, rows: Tensor) -> Tensor:
        return self._gathered(rows.float()).sum(0)

    def share_tokens(self, last_token: Tensor, num_tokens: Tensor, slots: Tensor) -> None:
        if not len(slots):
            return
        index = slots.long()
        values = torch.stack((last_token.index_select(0, index), num_tokens.index_select(0, index)))
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.asyncOp = False
        _wait(self.processes.broadcast([values], options))
        if self.rank:
            last_token.index_copy_(0, index, values[0])
            num_tokens.index_copy_(0, index, values[1])

    def gather_logits(self, part: Tensor, out: Tensor | None) -> None:
        every = self._gathered(part)  # every rank's, on every rank: NCCL has no gather that a graph can hold
        if out is not None:
            out.copy_(every.transpose(0, 1).flatten(1)[:, : out.shape[1]])

    def agree(self, value: int, how: Agreed) -> int:
        values = _all_gathered(self.hosts, torch.tensor([value], dtype=torch.int64)).flatten().tolist()
        return int(min(values) if how is Agreed.LEAST else values[0])

    def fault(self) -> str | None:
        """Why results mean nothing any more; None as far as is known they do."""
        return None

    def abandon(self) -> None:
        """A rank is gone: let calls that wait for it on a device end, with results that mean nothing.

        For any thread. The group is at its end. May be called again. NCCL ends what is on its way at once, but the call
        returns when no graph has sums of the group any more.
        """
        if self.processes is not self.hosts:
            with contextlib.suppress(RuntimeError):  # it was abandoned
                self.processes.abort()

    def leave(self) -> None:
        """The group is not used again, and no graph has its sums any more. Other ranks need not be there."""
        if self.processes is self.hosts:
            return
        ending = threading.Thread(target=self.abandon, name="leave-group", daemon=True)  # a step may be on its way
        try:
            ending.start()
        except RuntimeError:  # the program is at its end: some versions of Python start no thread there
            return
        ending.join(LEAVE_TIMEOUT_S)
        if ending.is_alive():
            logger.warning("NCCL has not let go of the other ranks within %g s: it is left to its end", LEAVE_TIMEOUT_S)
        else:
            dist.destroy_process_group()

    def _gathered(self, part: Tensor) -> Tensor:
        """[size, *part.shape]"""
        return _all_gathered(self.processes, part)


def _all_gathered(processes: dist.ProcessGroup, part: Tensor) -> Tensor:
    every = part.new_empty(processes.size(), *part.shape)
    if part.numel():
        options = dist.distributed_c10d.AllgatherOptions()
        options.asyncOp = False  # on a GPU: on the stream of the caller
        _wait(processes._allgather_base(every.view(-1), part.reshape(-1), options))
    return every


def _wait(work: dist.Work | None) -> None:
    if work is not None:  # a device's stream has it
        work.wait()


def join_group(folder: Path, rank: int, size: int, device: torch.device) -> TorchGroup:
    """Meet the other ranks by a file in the folder, which must be new, and wait until all have come.

    On CPUs the group is this caller's alone: others in this process, torch's own default one among them, are not
    touched, and it ends with the last reference to it. On GPUs it is the process's default one, as what maps the
    devices' memory wants it, the device must be the current one, and `leave` ends it.
    Raises `RuntimeError` where the others do not come in time.
    """
    store, timeout = dist.FileStore(str(folder / "ranks"), size), timedelta(seconds=START_TIMEOUT_S)
    gloo: Any = dist.ProcessGroupGloo  # whose options torch's own types leave out
    options = gloo._Options()
    options._timeout = timeout
    options._devices = [gloo.create_device(interface="lo")]  # one host, whatever its name resolves to
    hosts = gloo(dist.PrefixStore("hosts", store), rank, size, options)
    if device.type != "cuda":
        return TorchGroup(hosts, device)
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    devices = dist.PrefixStore("devices", store)
    dist.init_process_group("nccl", store=devices, rank=rank, world_size=size, timeout=timeout, device_id=device)
    processes = dist.group.WORLD
    assert processes is not None  # it has just been made
    return TorchGroup(processes, device, hosts)
