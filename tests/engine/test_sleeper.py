"""A runner's memory goes and comes: every family and format answers as before, from the same addresses."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from cb_backend.contracts.token_rules import TokenRules
from cb_backend.engine.llm_engine import create_engine
from cb_backend.engine.runner import host_copy, runner_factory, sleeper
from cb_backend.engine.runner.memory_range import HostRange
from cb_backend.engine.runner.model_tensors import move, storage_bytes, tensors_of
from tests.engine.adapted import adapted_engine, source_of
from tests.engine.drive import config, run
from tests.engine.sleeping_engine import (
    CPU,
    GREEDY,
    PROMPTS,
    answers,
    check_sleeps,
    sleep_and_wake,
    sleeper_of,
    sleeping_engine,
)
from tests.models.adapters import modules_of, write_adapter
from tests.models.quantised_models import FORMATS, pair
from tests.models.tiny_checkpoints import CONFIGS, write_checkpoint

# The first of each class, and ropes with numbers of their own.
FAMILIES = [*{kind: name for name, (kind, _) in reversed(CONFIGS.items())}.values(), "llama-longrope", "llama-dynamic"]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_answers_as_before_with_weights_out_of_its_files(name: str, tmp_path: Path) -> None:
    folder = write_checkpoint(name, tmp_path)
    plain = create_engine(config(str(folder), max_num_seqs=4, num_gpu_blocks_override=64))
    engine = sleeping_engine(folder)
    assert answers(engine) == answers(plain)
    check_sleeps(engine, times=1)


@pytest.mark.parametrize("name", ["llama-gqa", "gpt-oss-mxfp4", "llama-longrope", "gemma3"])
def test_weights_come_back_out_of_host_memory(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_copy, "PIECE_BYTES", 1 << 12)
    engine = sleeping_engine(write_checkpoint(name, tmp_path), "host")
    shutil.rmtree(tmp_path)  # nobody reads it again
    assert not sleeper_of(engine).prepare(), "a piece at a time"
    check_sleeps(engine)


@pytest.mark.parametrize("where", ["files", "host"])
@pytest.mark.parametrize("name", FORMATS)
def test_every_packed_format_comes_back_to_its_places(name: str, where: str, tmp_path: Path) -> None:
    given, writer = FORMATS[name]
    _, quantised = pair(tmp_path, "llama", given, writer)
    check_sleeps(sleeping_engine(quantised, where), times=1)


def test_layers_that_make_new_tensors_are_settled_while_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sleeper, "SETTLE_EVERY", 1)
    given, writer = FORMATS["gptq 64"]
    _, quantised = pair(tmp_path, "llama", given, writer)
    check_sleeps(sleeping_engine(quantised))


def test_fp8_made_at_the_start_is_made_again(tmp_path: Path) -> None:
    check_sleeps(sleeping_engine(write_checkpoint("llama-gqa", tmp_path), quantization="fp8"))


def test_random_weights_are_the_same_again(tmp_path: Path) -> None:
    check_sleeps(sleeping_engine(write_checkpoint("llama-gqa", tmp_path), load_format="dummy", seed=3))


def test_adapters_stay_in_their_slots(tmp_path: Path) -> None:
    base = write_checkpoint("llama-gqa", tmp_path / "base")
    options = {"r": 4, "lora_alpha": 8, "target_modules": modules_of("llama-gqa")}
    adapters = {i: source_of(write_adapter(base, tmp_path / f"a{i}", seed=i, **options)) for i in (0, 1)}
    engine = adapted_engine(base, idle_sleep_s=0)
    before = run(engine, PROMPTS, GREEDY, adapters=adapters).token_ids
    num_loads = engine.stats().adapters.num_loads  # type: ignore[union-attr]
    sleep_and_wake(engine)
    assert run(engine, PROMPTS, GREEDY, adapters=adapters).token_ids == before
    assert engine.stats().adapters.num_loads == num_loads, "not loaded again"  # type: ignore[union-attr]


def test_preempted_requests_kept_on_the_host_go_on_after_a_sleep(tmp_path: Path) -> None:
    folder = write_checkpoint("llama-gqa", tmp_path)
    settings = {"num_gpu_blocks_override": 14, "block_size": 4, "max_model_len": 64}
    long = TokenRules(max_tokens=20, temperature=0.0, ignore_eos=True, seed=0)
    prompts = [[index + 1] * 9 for index in range(4)]
    expected = run(create_engine(config(str(folder), max_num_seqs=4, **settings)), prompts, long).token_ids
    engine = sleeping_engine(folder, swap_space=0.001, **settings)
    assert run(engine, prompts, long).token_ids == expected
    sleep_and_wake(engine)
    assert run(engine, prompts, long).token_ids == expected
    assert engine.scheduler.num_preemptions > 0


def test_without_idle_sleep_s_nothing_is_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who does not use it pays nothing: no range, no copy, PyTorch's own memory."""

    def never(*_: object) -> None:
        raise AssertionError("a model that does not sleep")

    monkeypatch.setattr(runner_factory, "RunnerSleeper", never)
    engine = create_engine(config(str(write_checkpoint("llama-gqa", tmp_path)), num_gpu_blocks_override=64))
    assert engine.runner.sleeper is None  # type: ignore[attr-defined]


def test_a_range_holds_what_is_placed_and_no_more() -> None:
    held = HostRange(1000)
    first, second = held.place(300), held.place(20)
    assert (second.data_ptr() - first.data_ptr(), first.data_ptr() % 512) == (512, 0)
    with pytest.raises(ValueError, match="do not fit"):
        held.place(600)


def test_views_of_one_storage_move_together() -> None:
    whole = torch.arange(12.0).view(3, 4)
    model = {"whole": whole, "row": whole[1], "again": [whole], "other": torch.ones(3, dtype=torch.bfloat16)}
    found = tensors_of(model, CPU)
    assert len(found) == 3
    assert storage_bytes(found) == 1024
    move(found, HostRange(storage_bytes(found)))
    model["row"][0] = 100.0  # type: ignore[index]
    assert whole[1, 0] == 100.0
    assert model["other"].tolist() == [1.0] * 3  # type: ignore[union-attr]
