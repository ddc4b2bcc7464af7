"""An engine whose requests go through adapters, given to the runner directly: no scheduler decides about slots."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from cb_backend.contracts.step import MaskSource, Pending, StepPlan
from cb_backend.engine.llm_engine import LLMEngine, create_engine
from tests.engine.drive import config, with_reference_runner


class GivenAdapters:
    """A runner around an engine's: requests have the adapters' slots that are given by their ids.

    The first plan loads all adapters, slot i the i-th; `reload` puts other ones there with the next plan.
    """

    def __init__(self, engine: LLMEngine, folders: list[Path]) -> None:
        self.runner: Any = engine.runner
        self.slot_of: Mapping[int, int] = {}
        self._packed: dict[bytes, Any] = {}
        self._loads: tuple[tuple[int, bytes], ...] = ()
        self.runner.adapters.packed_of = self._packed.__getitem__
        self.reload(folders)
        engine.runner = self

    def reload(self, folders: list[Path]) -> None:
        packed = [self.runner.adapters.read(str(folder)) for folder in folders]
        self._packed |= {each.key: each for each in packed}
        self._loads = tuple((slot, each.key) for slot, each in enumerate(packed))

    def execute(self, plan: StepPlan, masks: MaskSource) -> Pending:
        joined = tuple(replace(row, adapter=self.slot_of.get(row.request_id, -1)) for row in plan.joined)
        loads, self._loads = self._loads, ()
        pending: Pending = self.runner.execute(msgspec.structs.replace(plan, joined=joined, adapter_loads=loads), masks)
        return pending

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)


def adapted_engine(
    folder: Path, adapters: list[Path], slot_of: Mapping[int, int], kind: str = "slots", **settings: Any
) -> tuple[LLMEngine, GivenAdapters]:
    """kind: of the runner, as in `drive.engine_for`. Prefixes are not cached unless asked for: nothing here tells the
    cache which adapter they went through."""
    usual = {
        "block_size": 4, "max_num_batched_tokens": 16, "max_num_seqs": 5, "kv_cache_memory_bytes": 1 << 22,
        "enable_lora": True, "max_loras": max(len(adapters), 1), "max_lora_rank": 8, "enable_prefix_caching": False,
    }  # fmt: skip
    built = config(str(folder), **{**usual, **settings})
    engine = with_reference_runner(built) if kind == "reference" else create_engine(built)
    given = GivenAdapters(engine, adapters)
    given.slot_of = slot_of
    return engine, given
