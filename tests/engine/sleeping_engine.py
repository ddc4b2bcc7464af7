"""An engine in this process whose runner may sleep: how a test has it sleep and wake, and what must be as before."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cb_backend.contracts.token_rules import TokenRules
from cb_backend.engine.llm_engine import LLMEngine, create_engine
from cb_backend.engine.runner.model_tensors import tensors_of
from cb_backend.engine.runner.sleeper import RunnerSleeper
from tests.engine.drive import config, run
from tests.models.noisy_copy import noisy_copy
from tests.models.tiny_checkpoints import write_checkpoint
from tests.waiting import eventually

GREEDY = TokenRules(max_tokens=6, temperature=0.0, ignore_eos=True, seed=0)
PROMPTS = [[1, 2, 3, 4, 5] * 5, [9, 8, 7], [3]]
CPU = torch.device("cpu")


def sleeping_engine(folder: Path, where: str = "files", **settings: object) -> LLMEngine:
    sizes = {"max_num_seqs": 4, "num_gpu_blocks_override": 64}
    return create_engine(config(str(folder), idle_sleep_s=0, sleep_weights=where, **{**sizes, **settings}))


def sleeper_of(engine: LLMEngine) -> RunnerSleeper:
    found = engine.runner.sleeper  # type: ignore[attr-defined]
    assert isinstance(found, RunnerSleeper)
    return found


def answers(engine: LLMEngine) -> dict[int, list[int]]:
    return run(engine, PROMPTS, GREEDY).token_ids


def addresses(engine: LLMEngine) -> dict[str, int]:
    runner = engine.runner
    tensors = tensors_of(runner.model, CPU) + tensors_of(runner.storage, CPU)  # type: ignore[attr-defined]
    return {path: tensor.data_ptr() for path, tensor in tensors}


def sleep_and_wake(engine: LLMEngine) -> None:
    """As `Rest` does."""
    own = sleeper_of(engine)
    while not own.prepare():
        pass
    engine.scheduler.gate.forget_cache()
    own.sleep()
    assert own.held_bytes == 0
    own.wake(lambda: None)
    eventually(lambda: own.is_awake, "what was put back is there")


def check_sleeps(engine: LLMEngine, times: int = 2) -> None:
    before, places = answers(engine), addresses(engine)
    for _ in range(times):
        sleep_and_wake(engine)
        assert addresses(engine) == places
        assert answers(engine) == before
    engine.close()


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    """Checkpoints of one specification."""
    folder = write_checkpoint("llama-gqa", tmp_path / "one")
    return folder, noisy_copy(folder, tmp_path / "two", 0.5)
