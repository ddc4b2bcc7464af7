"""Adapters whose files change, break or vanish while the engine runs: who named them is told, nobody else notices."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from cb_backend.contracts.adapters import AdapterSource
from cb_backend.contracts.request import FinishReason
from cb_backend.contracts.token_rules import TokenRules
from cb_backend.engine.llm_engine import LLMEngine
from tests.engine.adapted import adapted_engine, source_of
from tests.engine.drive import run
from tests.models.adapters import ALL_MODULES, load_merged, write_adapter

GREEDY = TokenRules(max_tokens=10, temperature=0.0, ignore_eos=True, seed=0)
PROMPTS = [tuple(np.random.default_rng(index).integers(3, 97, 6 + 3 * index).tolist()) for index in range(6)]
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def kept(gqa_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ...]:
    """Three adapters that nothing changes."""
    made = tmp_path_factory.mktemp("kept")
    return tuple(
        write_adapter(gqa_folder, made / str(rank), seed=rank, r=rank, target_modules=ALL_MODULES) for rank in (1, 4, 8)
    )


@pytest.fixture
def changing(kept: tuple[Path, ...], tmp_path: Path) -> Path:
    """A copy of the first, which a test may change."""
    return Path(shutil.copytree(kept[0], tmp_path / "changing"))


@cache
def greedy(folder: Path, adapter: Path | None) -> list[list[int]]:
    """What transformers makes of each prompt."""
    model, answers = load_merged(folder, adapter), []
    with torch.inference_mode():
        for prompt in PROMPTS:
            tokens = list(prompt)
            for _ in range(GREEDY.max_tokens):
                tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
            answers.append(tokens[len(prompt) :])
    return answers


def answers(engine: LLMEngine, sources: dict[int, AdapterSource]) -> list[list[int]]:
    got = run(engine, PROMPTS, GREEDY, adapters=sources)
    assert got.failures == {}
    return [got.token_ids[index] for index in range(len(PROMPTS))]


def spoil(folder: Path) -> None:
    """One number of the weights is none."""
    tensors = load_file(folder / WEIGHTS)
    next(iter(tensors.values()))[0, 0] = float("nan")
    save_file(tensors, folder / WEIGHTS)


def test_a_name_whose_files_change_is_what_they_hold_from_then_on(
    gqa_folder: Path, kept: tuple[Path, ...], changing: Path
) -> None:
    """Also for prompts whose blocks are cached: those are of the old weights. And back again, where they are found."""
    engine = adapted_engine(gqa_folder, max_loras=2)
    cached = []
    for content in (0, 1, 0):
        shutil.copytree(kept[content], changing, dirs_exist_ok=True)
        before = engine.stats().num_cached_prompt_tokens
        assert answers(engine, dict.fromkeys(range(6), source_of(changing))) == greedy(gqa_folder, kept[content])
        cached.append(engine.stats().num_cached_prompt_tokens - before)
    assert cached[0] == cached[1] == 0 < cached[2]


def test_requests_that_run_finish_with_what_they_began_with(
    gqa_folder: Path, kept: tuple[Path, ...], changing: Path
) -> None:
    engine = adapted_engine(gqa_folder, max_loras=2)
    old = source_of(changing)
    first = engine.make_request(0, np.asarray(PROMPTS[0], np.int32), GREEDY, adapter=old)
    engine.add_request(first)
    got: dict[int, list[int]] = {0: [], 1: []}
    is_changed = False
    for _ in range(20_000):
        engine.release_held()
        output = engine.step()
        if output is None:
            time.sleep(0.001)  # it is read by a thread
        for request, token in zip(*([], []) if output is None else (output.request_ids, output.token_ids), strict=True):
            got[int(request)].append(int(token))
        if len(got[0]) >= 3 and not is_changed:
            shutil.copytree(kept[2], changing, dirs_exist_ok=True)
            new = source_of(changing)
            assert new != old
            engine.add_request(engine.make_request(1, np.asarray(PROMPTS[0], np.int32), GREEDY, adapter=new))
            is_changed = True
        if is_changed and not engine.has_unfinished():
            break
    assert got == {0: greedy(gqa_folder, kept[0])[0], 1: greedy(gqa_folder, kept[2])[0]}


@pytest.mark.parametrize(
    ("break_it", "told"),
    [
        (spoil, "holds numbers that are not finite"),
        (
            lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-9]),
            "not a whole safetensors",
        ),
        (lambda folder: (folder / WEIGHTS).unlink(), "adapter_model.safetensors is missing"),
        (lambda folder: shutil.rmtree(folder), "adapter_config.json is missing"),
        (lambda folder: (folder / "adapter_config.json").write_text('{"peft_type": "LO'), "not valid JSON"),
    ],
    ids=["nan", "cut off", "no weights", "nothing", "half a config"],
)
def test_broken_files_end_their_own_requests_alone(
    break_it: Callable[[Path], object], told: str, gqa_folder: Path, kept: tuple[Path, ...], changing: Path
) -> None:
    source, others = source_of(changing), source_of(kept[1])
    break_it(changing)
    engine = adapted_engine(gqa_folder, max_loras=2)
    got = run(engine, PROMPTS, GREEDY, adapters={0: source, 1: others, 3: source, 4: others})
    assert {*got.failures} == {0, 3}
    for failure in got.failures.values():
        assert told in failure
        assert str(changing) not in failure, "a client is told no path"
    assert got.reasons[0] == got.reasons[3] == FinishReason.ERROR
    for index, adapter in ((1, kept[1]), (2, None), (4, kept[1]), (5, None)):
        assert got.token_ids[index] == greedy(gqa_folder, adapter)[index]
    engine.scheduler.check_integrity()


def test_all_at_once(gqa_folder: Path, kept: tuple[Path, ...]) -> None:
    """Two slots for three adapters and the base model, and few blocks: every answer is right."""
    engine = adapted_engine(gqa_folder, max_loras=2, num_gpu_blocks_override=14, max_num_seqs=4)
    adapters = (None, *kept)
    for turn in range(4):
        chosen = {index: adapters[(index + turn) % len(adapters)] for index in range(len(PROMPTS))}
        got = answers(engine, {index: source_of(each) for index, each in chosen.items() if each is not None})
        for index, adapter in chosen.items():
            assert got[index] == greedy(gqa_folder, adapter)[index]
    stats = engine.stats()
    assert stats.num_preemptions > 0
    engine.scheduler.check_integrity()
