"""Which way the devices of a group add up: over memory that they share, where that works, else over a library."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from cb_backend.parallel.group import Agreed
from cb_backend.parallel.peer_group import PeerGroup, PeerMemory, bytes_needed, peer_fault
from cb_backend.parallel.torch_group import TorchGroup

ONE_SHOT_BYTES = 512 << 10  # of a sum: with more than two devices, larger ones are faster in two steps

OpenMemory = Callable[[dist.ProcessGroup, int, torch.device], PeerMemory]


_has_opened = False  # by `open_peer_memory`


def open_peer_memory(processes: dist.ProcessGroup, num_bytes: int, device: torch.device) -> PeerMemory:
    """So many bytes of zeros on every rank's GPU, mapped by all. Raises `RuntimeError` where that cannot be.

    For a process that `can_open_peer_memory`, and where all ranks call it.
    """
    global _has_opened
    _has_opened = True
    import torch.distributed._symmetric_memory as symmetric_memory

    own = symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=device)
    handle = symmetric_memory.rendezvous(own, processes)
    own.zero_()
    ranks = tuple(handle.get_buffer(rank, (num_bytes,), torch.uint8) for rank in range(processes.size()))
    return PeerMemory(own, ranks)


def can_open_peer_memory() -> bool:
    """Whether this process has not done so yet: torch numbers its exchanges of addresses in each process, and would
    wait for the numbers of a new one for ever."""
    return not _has_opened


def choose_group(
    group: TorchGroup,
    max_rows: int,
    hidden_size: int,
    dtype: torch.dtype,
    *,
    log: Callable[[str], None],
    is_peer_wanted: bool = True,
    can_open: bool = True,
    open_memory: OpenMemory = open_peer_memory,
) -> TorchGroup:
    """A `PeerGroup` for sums of up to `max_rows` rows where every rank can read the others' memory, else `group`.

    is_peer_wanted: the same on all ranks. can_open: whether this rank's process may call `open_memory`.
    All ranks choose alike. Says what was chosen and why, once, on rank 0.
    """
    chosen, why = _choose(group, max_rows, hidden_size, dtype, is_peer_wanted, can_open, open_memory)
    if group.rank == 0:
        way = "over memory that they share" if isinstance(chosen, PeerGroup) else "with torch.distributed"
        log(f"{group.size} devices add up {way}: {why}")
    return chosen


def _choose(
    group: TorchGroup,
    max_rows: int,
    hidden_size: int,
    dtype: torch.dtype,
    is_peer_wanted: bool,
    can_open: bool,
    open_memory: OpenMemory,
) -> tuple[TorchGroup, str]:
    if group.device.type != "cuda" and open_memory is open_peer_memory:
        return group, "they are CPUs"
    if not is_peer_wanted:
        return group, "disable_custom_all_reduce is set"
    if group.size > 2:
        max_rows = min(max_rows, ONE_SHOT_BYTES // (hidden_size * dtype.itemsize))
    if not max_rows:
        return group, f"rows of {hidden_size} numbers are too long"
    if not group.agree(int(can_open), Agreed.LEAST):
        return group, "the process of one has shared memory with others before, and torch lets it do so once"
    memory, fault = None, "another rank could not map the others' memory"
    try:
        memory = open_memory(group.processes, bytes_needed(max_rows, hidden_size, dtype), group.device)
    except (RuntimeError, OSError) as error:
        fault = f"their memory cannot be mapped ({str(error).splitlines()[0][:200]})"
    if not group.agree(int(memory is not None), Agreed.LEAST) or memory is None:
        return group, fault
    found = peer_fault(group, memory)
    if found is not None:
        return group, found
    peers = PeerGroup(group, memory, max_rows, hidden_size, dtype)
    peers.agree(0, Agreed.LEAST)  # nobody adds up before all are here
    return peers, f"each reads what the others write; sums of up to {max_rows} rows"
