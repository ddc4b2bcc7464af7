"""Captured graphs replay on memory that has gone and come back. pytest -m gpu tests/engine/test_sleep_on_gpu.py"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cb_backend.contracts.config import engine_config_from_dict
from cb_backend.contracts.rest import NoRoomError
from cb_backend.contracts.token_rules import TokenRules
from cb_backend.engine.llm_engine import LLMEngine, create_engine
from cb_backend.engine.runner.cuda_range import CudaRange
from tests.engine.drive import run
from tests.engine.sleeping_engine import sleep_and_wake, sleeper_of
from tests.models.noisy_copy import noisy_copy
from tests.models.quantised_models import FORMATS, pair
from tests.models.tiny_checkpoints import write_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

GREEDY = TokenRules(max_tokens=24, temperature=0.0, ignore_eos=True, seed=0)
PROMPTS = [[1, 2, 3, 4, 5] * 5, [9, 8, 7], [3]]
GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _has_bindings() -> None:
    pytest.importorskip("cuda.bindings.driver")


def gpu_engine(folder: Path, where: str = "host", **settings: object) -> LLMEngine:
    usual = {"model": str(folder), "device": "cuda", "dtype": "bfloat16", "max_num_seqs": 4, "idle_sleep_s": 0}
    sizes = {"sleep_weights": where, "kv_cache_memory_bytes": 1 << 30}
    return create_engine(engine_config_from_dict({**usual, **sizes, **settings}))


def answers(engine: LLMEngine) -> list[list[int]]:
    """Each alone, so that no neighbour moves its rounding."""
    return [run(engine, [prompt], GREEDY).token_ids[0] for prompt in PROMPTS]


@pytest.mark.parametrize("where", ["host", "files"])
def test_graphs_answer_as_before_their_memory_went(where: str, tmp_path: Path) -> None:
    folder = write_checkpoint("llama-gqa", tmp_path)
    plain = gpu_engine(folder, "auto", idle_sleep_s=None)
    expected = answers(plain)
    plain.close()
    engine = gpu_engine(folder, where)
    assert engine.runner.graphs.shapes  # type: ignore[attr-defined]
    assert answers(engine) == expected
    for _ in range(5):
        sleep_and_wake(engine)
        assert answers(engine) == expected
    engine.close()


def test_a_sleeping_model_gives_the_memory_of_its_cache_back(tmp_path: Path) -> None:
    engine = gpu_engine(write_checkpoint("llama-gqa", tmp_path))
    own = sleeper_of(engine)
    while not own.prepare():
        pass
    before = torch.cuda.mem_get_info()[0]
    own.sleep()
    assert torch.cuda.mem_get_info()[0] - before >= 1 << 30
    own.wake(lambda: None)
    torch.cuda.synchronize()
    assert abs(torch.cuda.mem_get_info()[0] - before) < 64 << 20
    engine.close()


@pytest.mark.parametrize("name", ["awq 64", "gptq symmetric"])
def test_packed_weights_are_made_anew_at_their_places(name: str, tmp_path: Path) -> None:
    given, writer = FORMATS[name]
    _, quantised = pair(tmp_path, "llama", given, writer)
    engine = gpu_engine(quantised, "files")
    expected = answers(engine)
    sleep_and_wake(engine)
    assert answers(engine) == expected
    engine.close()


def test_updated_weights_answer_in_the_graphs_of_the_old(tmp_path: Path) -> None:
    old = write_checkpoint("llama-gqa", tmp_path / "old")
    new = noisy_copy(old, tmp_path / "new", 0.5)
    fresh = gpu_engine(new)
    expected = answers(fresh)
    fresh.close()
    engine = gpu_engine(old)
    before = answers(engine)
    key = sleeper_of(engine).update(new, lambda: None)
    engine.scheduler.gate.change_weights(b"", key)
    assert answers(engine) == expected != before
    sleep_and_wake(engine)
    assert answers(engine) == expected
    engine.close()


def test_a_range_without_memory_behind_it_waits_for_some() -> None:
    free = torch.cuda.mem_get_info()[0]
    held = CudaRange(free + (8 << 30), GPU)
    with pytest.raises(NoRoomError, match="are needed"):
        held.place(free + (4 << 30))
    assert held.held_bytes == 0
    held.close()
    small = CudaRange(64 << 20, GPU)
    place = small.place(32 << 20)
    place.fill_(7)
    assert int(place[-1]) == 7
    torch.cuda.synchronize()
    small.close()
    assert abs(torch.cuda.mem_get_info()[0] - free) < 64 << 20
