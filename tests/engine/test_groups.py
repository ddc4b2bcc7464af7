"""Models of several groups of layers: answers are transformers' own, whatever falls out of windows meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cb_backend.engine.llm_engine import LLMEngine, create_engine
from cb_backend.engine.runner.device_state import deltas_of_groups
from cb_backend.engine.step_shapes import StepShape
from cb_backend.kv_cache.block_pool import NULL_BLOCK
from tests.engine.drive import Run, config, run
from tests.engine.test_equal_to_transformers import GREEDY, reference
from tests.models.tiny_checkpoints import write_checkpoint

BLOCK = 4
LIKE_OTHERS = ("olmo3", "exaone4-hybrid")  # whose layers come in the order of gemma3's, in shorter turns
WINDOWS = {"gemma3": 9, "gpt-oss": 9, "olmo3": 9, "exaone4-hybrid": 10, "qwen2-mixed": 8, "mistral-window": 16}


def engine_of(folder: Path, num_blocks: int = 400, **changes: Any) -> LLMEngine:
    settings = {
        "block_size": BLOCK, "max_num_batched_tokens": 64, "max_num_seqs": 4, "max_model_len": 120,
        "num_gpu_blocks_override": num_blocks, "disable_hybrid_kv_cache_manager": False,
    }  # fmt: skip
    engine = create_engine(config(str(folder), **{**settings, **changes}))
    engine.scheduler._swap.fixed_cost_tokens = 0  # prompts are short here
    return engine


def prompts_of(folder: Path, lengths: list[int], seed: int = 0) -> list[list[int]]:
    """The second half of them begin like the longest."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(3, 97, max(lengths)).tolist()
    return [
        shared[: length - 2] + rng.integers(3, 97, 2).tolist() if index % 2 else rng.integers(3, 97, length).tolist()
        for index, length in enumerate(lengths)
    ]


def answers(got: Run, num_prompts: int) -> list[list[int]]:
    return [got.token_ids[index] for index in range(num_prompts)]


@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.long] * (name in LIKE_OTHERS)) for name in WINDOWS])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_checkpoint(request.param, tmp_path)


def test_every_way_of_running_a_request_gives_transformers_answer(folder: Path) -> None:
    """Alone, in chunks, found in the cache, preempted and computed again, preempted and swapped."""
    prompts = prompts_of(folder, [41, 50, 37, 44])
    expected = reference(folder, prompts, GREEDY.max_tokens)
    engine = engine_of(folder)
    windows = engine.info.kv_windows
    assert any(windows)
    for index, prompt in enumerate(prompts):
        assert run(engine_of(folder), [prompt], GREEDY).token_ids[0] == expected[index]
    assert answers(run(engine, prompts, GREEDY), 4) == expected
    for chunk in (1, 3, 7, 16):
        chunked = engine_of(folder, max_num_batched_tokens=chunk, max_num_seqs=min(4, chunk), run_ahead=2)
        assert answers(run(chunked, prompts, GREEDY), 4) == expected
    again = run(engine, prompts, GREEDY, arrivals=[0, 1, 2, 3])
    assert answers(again, 4) == expected
    assert engine.stats().num_cached_prompt_tokens >= sum(len(prompt) - 1 for prompt in prompts) // BLOCK * BLOCK - 16
    for swap_space in (0.0, 0.01):
        # Room for the longest request, and a little for others.
        tight: dict[str, Any] = {"max_num_batched_tokens": 8, "swap_space": swap_space, "run_ahead": 1}
        needs = engine_of(folder, **tight).scheduler._kv.num_blocks_for(72)
        small = engine_of(folder, needs + 4, **tight)
        assert answers(run(small, prompts, GREEDY), 4) == expected
        stats = small.stats()
        if 0 in windows:  # else nobody grows once his window is full
            assert stats.num_preemptions > 0
            assert (stats.num_swapped_in > 0) == (swap_space > 0)
        small.scheduler.check_integrity()
        assert stats.num_free_blocks == small.info.num_blocks


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_prompts_around_the_windows_edge_and_those_that_hit_them(tmp_path: Path, more: int) -> None:
    for name, window in WINDOWS.items():
        folder = write_checkpoint(name, tmp_path / name)
        rng = np.random.default_rng(window + more)
        prompt = rng.integers(3, 97, window + more).tolist()
        longer = prompt + rng.integers(3, 97, 5).tolist()
        engine = engine_of(folder)
        for tokens in (prompt, longer, prompt, longer):
            assert run(engine, [tokens], GREEDY).token_ids[0] == reference(folder, [tokens], GREEDY.max_tokens)[0]
        assert engine.stats().num_cached_prompt_tokens >= 2 * (window + more - 1) // BLOCK * BLOCK


def test_a_long_request_holds_its_windows_alone(tmp_path: Path) -> None:
    engine = engine_of(write_checkpoint("gemma3", tmp_path))
    window = WINDOWS["gemma3"]
    engine.add_request(engine.make_request(1, np.arange(3, 73, dtype=np.int32), GREEDY))
    for _ in range(10):
        engine.step()
    (request,) = engine.scheduler._table.by_id.values()
    windows = engine.info.kv_windows
    assert len(windows) > 1
    for group, kept in enumerate(windows):
        held = sum(block != NULL_BLOCK for block in request.block_table[group :: len(windows)])
        assert held == 20 if not kept else held <= -(-(window - 1) // BLOCK) + 1


def test_where_no_request_outgrows_a_window_there_is_one_group(tmp_path: Path) -> None:
    folder = write_checkpoint("gemma3", tmp_path)
    assert engine_of(folder, max_model_len=WINDOWS["gemma3"]).info.kv_windows == (0,)
    assert len(engine_of(folder, max_model_len=WINDOWS["gemma3"] + 1).info.kv_windows) > 1


def test_places_in_a_table_of_rows_become_those_of_each_groups_own() -> None:
    deltas = np.array([[4, 0, 11], [4, 1, 12], [0, 5, 13], [2, 6, 14]], np.int32)
    expected = [[4, 0, 11], [9 + 4, 0, 12], [2 * 9 + 0, 1, 13], [2, 2, 14]]
    assert deltas_of_groups(deltas, 3, 9).tolist() == expected


def test_a_steps_memory_holds_the_cells_of_every_group() -> None:
    one, two = StepShape(3, 6, 2), StepShape(3, 6, 2, num_groups=2)
    assert one.mapping_shape == (9,)
    assert two.mapping_shape == (2, 12)  # each begins at 16 bytes
    assert (one.sizes()["slot_mapping"], two.sizes()["slot_mapping"]) == (9, 24)
    assert (one.num_deltas, two.num_deltas) == (16, 32)


def test_groups_are_what_an_engine_is_asked_for(tmp_path: Path) -> None:
    folder = write_checkpoint("gemma3", tmp_path / "gemma3")
    assert engine_of(folder, disable_hybrid_kv_cache_manager=True).info.kv_windows == (0,)
    assert len(engine_of(folder).info.kv_windows) > 1
