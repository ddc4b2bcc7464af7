"""Adapters of random weights for a loaded engine: files as PEFT saves them, read as any others, kept for every pass.

No figure depends on their values. They share one file of weights and differ in their scale, which makes other contents
of each, read, kept and loaded apart. How long reading and loading one takes is measured on the way.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, cast

from cb_backend.contracts.adapters import AdapterKey
from cb_backend.engine.llm_engine import LLMEngine
from cb_backend.support.adapter_files import CONFIG_NAME, WEIGHTS_NAME

if TYPE_CHECKING:  # torch comes with them, and its import is a stage of the start-up
    from cb_backend.engine.runner.step_adapters import StepAdapters
    from cb_backend.layers.adapter_table import AdapterTable

TIMED_LOADS = 5
_STD = 0.01


class MadeUpAdapters:
    """`count` adapters in host memory, of the greatest rank that the engine takes."""

    def __init__(self, engine: LLMEngine, count: int) -> None:
        """Raises `ConfigError` where the model has no place for adapters, and what reading them raises."""
        self._adapters = cast("StepAdapters", engine.runner.adapters)  # type: ignore[attr-defined]
        read_seconds = []
        with TemporaryDirectory(prefix="adapters-") as folder:
            paths = write_adapters(Path(folder), self._adapters.table.whole, count)
            self._packed = {}
            for path in paths:
                start = time.perf_counter()
                packed = self._adapters.read(str(path))
                read_seconds.append(time.perf_counter() - start)
                self._packed[packed.key] = packed
        self.keys: Sequence[AdapterKey] = tuple(self._packed)
        self.nbytes = self._adapters.table.bytes_per_adapter
        self.read_seconds = statistics.median(read_seconds)
        self.load_seconds = statistics.median(self._load_seconds() for _ in range(TIMED_LOADS))

    def of_requests(self, num_requests: int, num_used: int) -> list[AdapterKey]:
        """`num_used` of them in turn. Plans of the engine made last find them."""
        self._adapters.packed_of = self._packed.__getitem__
        return [self.keys[index % num_used] for index in range(num_requests)]

    def record(self) -> dict[str, Any]:
        return {
            "adapter_bytes": self.nbytes,
            "adapter_read_ms": round(self.read_seconds * 1e3, 2),
            "adapter_load_ms": round(self.load_seconds * 1e3, 3),
        }

    def __str__(self) -> str:
        return (
            f"{len(self.keys)} adapters of {self.nbytes / 1e6:.3g} MB: one is read from its files in"
            f" {self.read_seconds * 1e3:.3g} ms and loaded to the device in {self.load_seconds * 1e3:.3g} ms"
            f" ({self.nbytes / self.load_seconds / 1e9:.3g} GB/s)"
        )

    def _load_seconds(self) -> float:
        """Of one, the device idle before. What a slot holds matters to no engine that has not loaded it itself."""
        import torch

        table = self._adapters.table
        wait = torch.cuda.synchronize if table.device.type == "cuda" else (lambda: None)
        wait()
        start = time.perf_counter()
        table.load(0, self._packed[self.keys[0]].data)
        wait()
        return time.perf_counter() - start


def write_adapters(folder: Path, table: AdapterTable, count: int) -> list[Path]:
    """Folders of adapters on all modules of a model, of its greatest rank; their scales tell them apart."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, (site, part) in table.modules.items():
        module = site.modules[part]
        for half, size in (("A", (table.max_rank, module.in_size)), ("B", (module.out_size, table.max_rank))):
            values = torch.empty(size, dtype=table.dtype).normal_(std=_STD, generator=generator)
            tensors[f"base_model.model.{name}.lora_{half}.weight"] = values
    weights = folder / WEIGHTS_NAME
    save_file(tensors, weights, metadata={"format": "pt"})
    targets = sorted({name.rpartition(".")[2] for name in table.modules})
    paths = []
    for index in range(count):
        path = folder / str(index)
        path.mkdir()
        (path / WEIGHTS_NAME).hardlink_to(weights)
        config = {"peft_type": "LORA", "r": table.max_rank, "lora_alpha": table.max_rank + index, "bias": "none"}
        (path / CONFIG_NAME).write_text(json.dumps({**config, "target_modules": targets}))
        paths.append(path)
    return paths
