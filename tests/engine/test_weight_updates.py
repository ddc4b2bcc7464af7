"""Other weights while an engine runs: they answer as if it had been started with them, or nothing has changed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from cb_backend.contracts.errors import ConfigError
from cb_backend.engine.llm_engine import create_engine
from tests.engine.drive import config
from tests.engine.sleeping_engine import addresses, answers, sleep_and_wake, sleeper_of, sleeping_engine, two
from tests.models.quantised_models import FORMATS, pair
from tests.models.tiny_checkpoints import write_checkpoint

__all__ = ["two"]  # a fixture


@pytest.mark.parametrize("where", ["files", "host"])
def test_updated_weights_answer_as_an_engine_that_was_started_with_them(where: str, two: tuple[Path, Path]) -> None:
    old, new = two
    engine = sleeping_engine(old, where)
    before, expected, places = answers(engine), answers(sleeping_engine(new)), addresses(engine)
    assert before != expected
    key = sleeper_of(engine).update(new, lambda: None)
    engine.scheduler.gate.change_weights(b"", key)
    assert len(key) == 16
    assert engine.runner.cache_key(5).startswith(key)
    assert answers(engine) == expected
    assert addresses(engine) == places
    sleep_and_wake(engine)
    assert answers(engine) == expected, "asleep it keeps the new ones"
    assert sleeper_of(engine).update(old, lambda: None) == b""
    engine.scheduler.gate.change_weights(key, b"")
    assert answers(engine) == before


def test_an_engine_that_starts_after_an_update_has_its_weights_and_all_else_of_its_model(
    two: tuple[Path, Path],
) -> None:
    """As the one before it had: neither where answers end nor how they are sampled depends on a crash."""
    old, new = two
    for folder, temperature in ((old, 0.25), (new, 0.75)):
        (folder / "generation_config.json").write_text(json.dumps({"temperature": temperature}))
    expected = answers(sleeping_engine(new))
    settings = config(str(old), idle_sleep_s=0, max_num_seqs=4, num_gpu_blocks_override=64, generation_config="auto")
    first, again = create_engine(settings), create_engine(settings, weights=new)
    assert again.info == first.info
    assert again.info.sampling_defaults == {"temperature": 0.25}
    own = sleeper_of(again)
    assert (answers(again), own.weights) == (expected, str(new))
    sleep_and_wake(again)
    assert answers(again) == expected
    key = own.update(old, lambda: None)
    again.scheduler.gate.change_weights(b"", key)
    assert (answers(again), own.weights) == (answers(first), "")
    os.utime(new / "model.safetensors", ns=(1, 1))
    assert own.update(new, lambda: None) not in (b"", key), "its files are not those of before"


@pytest.mark.parametrize("where", ["files", "host"])
def test_an_update_whose_file_ends_early_is_undone(where: str, two: tuple[Path, Path]) -> None:
    old, new = two
    engine = sleeping_engine(old, where)
    before, own = answers(engine), sleeper_of(engine)
    sleep_and_wake(engine)
    own.check_update(new)
    file = new / "model.safetensors"
    told: list[int] = []

    def cut() -> None:
        told.append(1)
        if len(told) == 3:
            file.write_bytes(file.read_bytes()[:-1000])

    with pytest.raises(ConfigError):
        own.update(new, cut)
    own.undo_update(lambda: None)
    engine.scheduler.gate.forget_cache()
    assert answers(engine) == before


def test_an_update_that_fails_half_way_is_not_undone_where_layers_make_tensors(tmp_path: Path) -> None:
    """The engine ends and starts with the old weights: part of the new ones may be in use."""
    given, writer = FORMATS["gptq 64"]
    _, folder = pair(tmp_path, "llama", given, writer)
    own = sleeper_of(sleeping_engine(folder, "host"))
    with pytest.raises(RuntimeError, match="the engine starts again with the old"):
        own.undo_update(lambda: None)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("llama-mha", "layers|attention"),
        ("llama-theta", "vocab_size|ropes"),
        ("llama-tied", "tie_word_embeddings"),
        ("qwen2-bias", "model_type"),
    ],
)
def test_another_specification_is_refused_by_what_differs(
    name: str, reason: str, two: tuple[Path, Path], tmp_path: Path
) -> None:
    own = sleeper_of(sleeping_engine(two[0]))
    with pytest.raises(ConfigError, match=rf"({reason}) is .*load it as a model of its own"):
        own.check_update(write_checkpoint(name, tmp_path / "other"))


def test_a_folder_without_weights_or_with_another_tokenizer_is_refused(two: tuple[Path, Path]) -> None:
    old, new = two
    own = sleeper_of(sleeping_engine(old))
    for folder, text in zip(two, ("{}", "{ }"), strict=True):
        (folder / "tokenizer.json").write_text(text)
    with pytest.raises(ConfigError, match=r"tokenizer\.json is not the one that is served"):
        own.check_update(new)
    (new / "tokenizer.json").write_text("{}")
    own.check_update(new)
    (new / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"holds no \.safetensors file"):
        own.check_update(new)
