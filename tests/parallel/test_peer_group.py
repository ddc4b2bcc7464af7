"""Sums over memory that ranks share, between processes of a CPU; and which way a group adds up, and why."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from cb_backend.parallel.choose_group import choose_group
from cb_backend.parallel.peer_group import PeerGroup, PeerMemory, bytes_needed, peer_fault
from cb_backend.parallel.torch_group import TorchGroup
from tests.parallel.ranks import on_ranks

pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 300.0


@pytest.mark.parametrize("size", [2, 3])
def test_processes_add_up_over_memory_that_they_share(size: int, tmp_path: Path) -> None:
    """With the kernel itself, which waits for the others' words: the bits that torch.distributed's way has."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.parallel.peer_ranks", str(tmp_path), str(rank), str(size)],
            cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(size)
    ]  # fmt: skip
    try:
        outputs = [rank.communicate(timeout=TIMEOUT_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * size, outputs
    told = f"{size} devices add up over memory that they share: each reads what the others write; sums of up to 4 rows"
    assert [out.strip() for out, _ in outputs] == [f"PeerGroup|15|15|{told}"] + ["PeerGroup|15|15"] * (size - 1)


class Memories:
    """Memory of ranks that are threads; what each rank sees of it is for the test to say."""

    def __init__(self, size: int) -> None:
        self.ranks = [torch.zeros(bytes_needed(4, 8, torch.float32), dtype=torch.uint8) for _ in range(size)]

    def open(self, processes: dist.ProcessGroup, num_bytes: int, device: torch.device) -> PeerMemory:
        return PeerMemory(self.ranks[processes.rank()], tuple(self.ranks))


def choose(
    size: int, open_memory: Callable[[dist.ProcessGroup, int, torch.device], PeerMemory], *, is_peer_wanted: bool = True
) -> tuple[list[TorchGroup], list[str]]:
    told: list[str] = []

    def work(group: TorchGroup) -> TorchGroup:
        return choose_group(
            group, 4, 8, torch.float32, log=told.append, is_peer_wanted=is_peer_wanted, open_memory=open_memory
        )

    return on_ranks(size, work), told


def test_memory_that_every_rank_reads_is_used() -> None:
    groups, told = choose(3, Memories(3).open)
    assert all(type(group) is PeerGroup for group in groups)
    assert told == [
        "3 devices add up over memory that they share: each reads what the others write; sums of up to 4 rows"
    ]


def test_memory_that_one_rank_reads_wrongly_is_used_by_none() -> None:
    """As of drivers that map it and then give rubbish."""
    memories = Memories(3)

    def open_memory(processes: dist.ProcessGroup, num_bytes: int, device: torch.device) -> PeerMemory:
        memory = memories.open(processes, num_bytes, device)
        if processes.rank() != 2:
            return memory
        return memory._replace(ranks=(memory.ranks[0], memory.ranks[1].clone(), memory.ranks[2]))

    groups, told = choose(3, open_memory)
    assert all(type(group) is TorchGroup for group in groups)
    assert told == ["3 devices add up with torch.distributed: what rank 1 wrote is not what another rank reads"]


@pytest.mark.parametrize("broken", [0, 1])
def test_memory_that_one_rank_cannot_map_is_used_by_none(broken: int) -> None:
    memories = Memories(2)

    def open_memory(processes: dist.ProcessGroup, num_bytes: int, device: torch.device) -> PeerMemory:
        if processes.rank() == broken:
            raise RuntimeError("pidfd_getfd: Operation not permitted\nand a trace")
        return memories.open(processes, num_bytes, device)

    groups, told = choose(2, open_memory)
    assert all(type(group) is TorchGroup for group in groups)
    why = ["their memory cannot be mapped (pidfd_getfd: Operation not permitted)", "another rank could not map the"]
    assert len(told) == 1
    assert why[broken] in told[0]


@pytest.mark.parametrize("spent", [0, 1])
def test_where_a_process_has_opened_memory_before_nothing_is_tried(spent: int) -> None:
    """One that lives on, beside new ones, as a program's that loads one model after another."""
    told: list[str] = []

    def open_memory(processes: dist.ProcessGroup, num_bytes: int, device: torch.device) -> PeerMemory:
        raise AssertionError

    def work(group: TorchGroup) -> TorchGroup:
        can_open = group.rank != spent
        return choose_group(group, 4, 8, torch.float32, log=told.append, can_open=can_open, open_memory=open_memory)

    assert all(type(group) is TorchGroup for group in on_ranks(2, work))
    why = "the process of one has shared memory with others before, and torch lets it do so once"
    assert told == [f"2 devices add up with torch.distributed: {why}"]


def test_nothing_is_tried_where_it_is_not_wanted_or_they_are_cpus() -> None:
    def open_memory(processes: dist.ProcessGroup, num_bytes: int, device: torch.device) -> PeerMemory:
        raise AssertionError

    _, told = choose(2, open_memory, is_peer_wanted=False)
    assert told == ["2 devices add up with torch.distributed: disable_custom_all_reduce is set"]
    told = []
    groups = on_ranks(2, lambda group: choose_group(group, 4, 8, torch.float32, log=told.append))
    assert all(type(group) is TorchGroup for group in groups)
    assert told == ["2 devices add up with torch.distributed: they are CPUs"]


def test_memory_that_was_tried_is_zeros_again() -> None:
    memories = Memories(2)
    found = on_ranks(2, lambda group: peer_fault(group, memories.open(group.processes, 0, group.device)))
    assert found == [None, None]
    assert not any(memory.any() for memory in memories.ranks)
