"""How much of a multiprocessor's memory a kernel takes as shared memory. The rest is the cache that loads go through.

Left alone, the driver makes room for as many programs as could run at once, even where a launch has fewer. What runs
next has to do with what is left: so little cache that fewer loads of weights are in flight in products of one row. So a
launcher that knows how many programs it has says so (CUDA C++ Programming Guide, "Shared Memory" of compute capability
9.0; the driver API's CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT). Results do not depend on it. On an H200 a
step of Llama-3.2-1B alone in a process takes 0.76 to 0.77 ms in place of 0.84 with one row, 1.37 in place of 1.40 to
1.41 with 64; other steps change by less than they differ from run to run.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any, NamedTuple

import torch

from cb_backend.kernels.launch import max_shared_bytes

_PREFERRED_CARVEOUT = 9  # CUfunction_attribute
_RESERVED_BYTES = 1024  # of shared memory, which each program takes beside its own

_chosen: dict[int, int] = {}  # percent, by the address of a loaded kernel


class Programs(NamedTuple):
    """Of a launch, a multiprocessor."""

    usual: int
    most: int  # where work is uneven


def make_room_for(compiled: Any, programs: Programs, device: torch.device) -> None:
    """Let a kernel's later launches take shared memory for so many programs, and no more. The first launch of another
    number has what was asked for before; a captured graph keeps what its launches had.

    compiled: what the last launch returned, a `triton.compiler.CompiledKernel`. Where that is None, or not loaded (as
    in most rehearsals), nothing is done.
    """
    function: int | None = None if compiled is None or device.type != "cuda" else compiled.function
    if function is None:
        return
    percent = carveout(compiled.metadata.shared, programs, max_shared_bytes(device) + _RESERVED_BYTES)
    if _chosen.get(function) != percent and prefer(function, percent):
        _chosen[function] = percent


@functools.cache
def carveout(program_bytes: int, programs: Programs, most_bytes: int) -> int:
    """Percent of the most shared memory that a multiprocessor can have; the driver takes the next size that there is.

    Room for all programs at once, or else for as few as need no more rounds than the most that fit.
    """
    own_bytes = program_bytes + _RESERVED_BYTES
    num_fitting = max(most_bytes // own_bytes, 1)
    rounds = -(-programs.usual // num_fitting)
    at_once = min(programs.most, num_fitting) if rounds == 1 else -(-programs.usual // rounds)
    return min(-(-100 * at_once * own_bytes // most_bytes), 100)


def prefer(function: int, percent: int) -> bool:
    """Tell the driver, for the launches to come; -1: let it choose. Returns whether it took it."""
    result: int = _driver().cuFuncSetAttribute(ctypes.c_void_p(function), _PREFERRED_CARVEOUT, percent)
    return result == 0


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")  # loaded already, by torch
