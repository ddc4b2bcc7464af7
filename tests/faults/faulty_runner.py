"""The real model runner with faults that a test arms from outside, through a file.

`worker_cls` names `create_runner`; the file is named by CB_TEST_FAULTS and holds {"kind": ..., "count": ...}: what is
to go wrong in the next so many steps (or rows, or allocations). A file that changes is read before the next step.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch

from cb_backend.contracts.config import EngineConfig
from cb_backend.contracts.messages import ModelInfo
from cb_backend.contracts.step import MaskSource, Pending, StepPlan
from cb_backend.engine.runner import runner_factory
from cb_backend.kv_cache.block_pool import BlockPool

ENVIRONMENT = "CB_TEST_FAULTS"
POISON = {"nan row": float("nan"), "inf row": float("inf"), "-inf row": float("-inf")}


class FaultFile:
    """What is armed now. `write` in the test's process, `take` in the engine's."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._version = self._read_version()  # what was armed before has happened to another process
        self._kind, self._count = "", 0

    def write(self, kind: str, count: int = 1) -> None:
        fresh = self._path.with_suffix(".new")
        fresh.write_text(json.dumps({"kind": kind, "count": count}))
        fresh.replace(self._path)

    def look(self) -> None:
        version = self._read_version()
        if version != self._version:
            self._version = version
            armed = json.loads(self._path.read_text())
            self._kind, self._count = armed["kind"], armed["count"]

    def _read_version(self) -> int:
        try:
            return self._path.stat().st_mtime_ns
        except OSError:
            return 0

    def take(self, *kinds: str) -> str | None:
        """The fault to commit now, if it is one of these."""
        if self._count > 0 and self._kind in kinds:
            self._count -= 1
            return self._kind
        return None


class FaultyRunner:
    """Implements `step.Runner` over another one."""

    def __init__(self, runner: Any, faults: FaultFile) -> None:
        self._runner = runner
        self._faults = faults
        self._leak: list[bytes] = []
        self.adapters = runner.adapters
        compute_logits = runner.model.compute_logits

        def poisoned(*arguments: Any) -> torch.Tensor:
            logits: torch.Tensor = compute_logits(*arguments)
            kind = faults.take(*POISON)
            if kind is not None:
                logits[0] = POISON[kind]
            return logits

        runner.model.compute_logits = poisoned

    def execute(self, plan: StepPlan, masks: MaskSource) -> Pending:
        self._faults.look()
        kind = self._faults.take("raise", "memory", "hang", "leak")
        if kind == "raise":
            raise RuntimeError("this step was told to fail")
        if kind == "memory":
            raise MemoryError("Unable to allocate 3.81 MiB for an array")
        if kind == "hang":
            time.sleep(3600)
        if kind == "leak":
            self._leak.append(os.urandom(4096))
        return self._runner.execute(plan, masks)

    def cache_key(self, num_prompt_tokens: int) -> bytes:
        return bytes(self._runner.cache_key(num_prompt_tokens))

    def close(self) -> None:
        self._runner.close()


def create_runner(config: EngineConfig) -> tuple[FaultyRunner, ModelInfo]:
    faults = FaultFile(Path(os.environ[ENVIRONMENT]))
    runner, info = runner_factory.create_runner(config)
    allocate = BlockPool.allocate

    def failing_allocate(pool: BlockPool, *arguments: Any) -> Any:
        if faults.take("block"):
            raise MemoryError("no memory for a block's bookkeeping")
        return allocate(pool, *arguments)

    BlockPool.allocate = failing_allocate  # type: ignore[method-assign]
    if runner.swapper is not None:
        apply = runner.swapper.apply

        def failing_apply(plan: StepPlan) -> None:
            if plan.copies.out and faults.take("swap"):
                raise RuntimeError("a copy to host memory failed")
            apply(plan)

        runner.swapper.apply = failing_apply  # type: ignore[method-assign]
    return FaultyRunner(runner, faults), info
