"""Adapters of a runner: reads their files, brings those a plan asks for to the device, plans the rows of each step.

Which adapter is in which slot is the scheduler's business, and which are kept on the host is the engine's.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from cb_backend.contracts.adapters import DEFAULT_MAX_LORAS, num_kept
from cb_backend.contracts.config import EngineConfig
from cb_backend.contracts.errors import ConfigError
from cb_backend.contracts.step import StepPlan
from cb_backend.engine.runner.step_buffers import StepBuffers
from cb_backend.kernels.lora_plan import AdapterPlan
from cb_backend.kv_cache.storage import free_memory, show_bytes
from cb_backend.layers.adapter_table import AdapterTable
from cb_backend.layers.ops import Ops
from cb_backend.models.lora_checkpoint import PackedAdapter, read_adapter
from cb_backend.models.spec import ModelSpec


class Packed(Protocol):
    """An adapter on the host, or this rank's share of one."""

    @property
    def data(self) -> Tensor: ...  # as `AdapterTable.load` wants it


class StepAdapters:
    """The slots of a table. `packed_of` is set by whoever keeps adapters on the host, before the first is asked for."""

    def __init__(self, table: AdapterTable, spec: ModelSpec, ops: Ops) -> None:
        self.table = table
        self.packed_of: Callable[[bytes], Packed] | None = None  # by its key
        self._spec = spec
        self._ops = ops

    def read(self, path: str) -> PackedAdapter:
        """An adapter's folder, where one device has all of the model. Touches nothing on it, so any thread may. Raises
        `ConfigError` for what cannot be served."""
        return read_adapter(Path(path), self._spec, self.table.whole)

    def load(self, plan: StepPlan) -> None:
        """Make the plan's loads. Call before anything of the step itself."""
        for slot, key in plan.adapter_loads:
            assert self.packed_of is not None, "a plan loads adapters that nobody keeps"
            self.table.load(slot, self.packed_of(key).data)

    def plan_step(self, buffers: StepBuffers, adapter_of_slot: Tensor) -> AdapterPlan:
        """Which of the step's tokens go through which adapter. adapter_of_slot: int32 [num_slots]."""
        shape, segments, slots = buffers.shape, buffers.segments, buffers.slots
        return self._ops.plan_adapters(
            slots,
            shape.num_decode,
            segments.get("prompt_slots", slots[:0]),
            segments.get("query_start_loc", slots[:0]),
            shape.num_prefill,
            adapter_of_slot,
            self.table.max_adapters,
        )


def new_adapter_table(config: EngineConfig, dtype: torch.dtype, device: torch.device) -> AdapterTable | None:
    """A table of the sizes that the configuration asks for; None where adapters are not enabled."""
    if not config.enable_lora:
        return None
    max_adapters = DEFAULT_MAX_LORAS if config.max_loras is None else config.max_loras
    return AdapterTable(max_adapters=max_adapters, max_rank=config.max_lora_rank, dtype=dtype, device=device)


def allocate_adapters(table: AdapterTable, max_cpu_loras: int | None, log: Callable[[str], None]) -> None:
    """Make the slab of a model that has been built, and tell what adapters take on the device and on the host.

    Raises `ConfigError` where the device has not so much memory.
    """
    free_bytes, _ = free_memory(table.device)
    sizes = f"{table.max_adapters} slots of rank {table.max_rank}, {show_bytes(table.nbytes)}"
    if table.nbytes > free_bytes:
        raise ConfigError(
            f"not enough memory for adapters: max_loras {table.max_adapters} of max_lora_rank {table.max_rank} take "
            f"{show_bytes(table.nbytes)}, and {show_bytes(free_bytes)} are free on the {table.device.type} device; "
            "lower one of them"
        )
    table.allocate()
    kept = num_kept(max_cpu_loras, table.max_adapters)
    on_host = show_bytes(kept * table.bytes_per_adapter)
    log(f"adapters: {sizes} on the {table.device.type} device, {kept} in host memory, up to {on_host}")
