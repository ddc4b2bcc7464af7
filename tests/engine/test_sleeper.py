"""A runner's memory goes and comes: every family and format answers as before, from the same addresses."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cb_backend.contracts.errors import ConfigError
from cb_backend.contracts.rest import NoRoomError, WeightsGoneError
from cb_backend.contracts.token_rules import TokenRules
from cb_backend.engine.llm_engine import LLMEngine, create_engine
from cb_backend.engine.runner import host_copy, memory_range, runner_factory, sleeper
from cb_backend.engine.runner.memory_range import HostRange
from cb_backend.engine.runner.model_tensors import move, storage_bytes, tensors_of
from cb_backend.engine.runner.sleeper import RunnerSleeper
from tests.engine.adapted import adapted_engine, source_of
from tests.engine.drive import config, run
from tests.models.adapters import modules_of, write_adapter
from tests.models.noisy_copy import noisy_copy
from tests.models.quantised_models import FORMATS, pair
from tests.models.tiny_checkpoints import CONFIGS, write_checkpoint
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


# ---- no memory ------------------------------------------------------------------------------------------------------


def test_a_model_without_room_stays_asleep_and_wakes_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = sleeping_engine(write_checkpoint("llama-gqa", tmp_path))
    before, own = answers(engine), sleeper_of(engine)
    assert own.prepare()
    engine.scheduler.gate.forget_cache()
    own.sleep()
    with monkeypatch.context() as patch:
        for module in (memory_range, sleeper):
            patch.setattr(module, "free_memory", lambda device: (1 << 10, 1 << 30))
        with pytest.raises(NoRoomError, match=r"are needed, 1\.0 KiB of 1\.00 GiB are free on the cpu device"):
            own.wake(lambda: None)
    assert own.held_bytes == 0
    own.wake(lambda: None)
    assert answers(engine) == before


def test_without_host_memory_for_a_copy_weights_are_read_from_their_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    engine = sleeping_engine(write_checkpoint("llama-longrope", tmp_path), "host")
    monkeypatch.setattr(host_copy, "free_memory", lambda device: (1 << 20, 1 << 30))
    own = sleeper_of(engine)
    own._copies["others"] = host_copy.HostCopy(own._ranges["others"])
    with monkeypatch.context() as patch:
        patch.setattr(host_copy.HostCopy, "prepare", _prepare_others(own))
        assert own.prepare()
    assert "not kept in host memory but read again" in capfd.readouterr().err
    check_sleeps_prepared(engine)


def _prepare_others(own: RunnerSleeper):  # type: ignore[no-untyped-def]
    """Small copies are always had; that of the weights never."""
    plain = host_copy.HostCopy.prepare

    def prepare(self: host_copy.HostCopy) -> bool:
        if self is own._copies.get("weights"):
            return plain(self)
        self._pieces = [torch.empty(len(self._of.data), dtype=torch.uint8)]
        return True

    return prepare


def check_sleeps_prepared(engine: LLMEngine) -> None:
    before, own = answers(engine), sleeper_of(engine)
    engine.scheduler.gate.forget_cache()
    own.sleep()
    own.wake(lambda: None)
    assert answers(engine) == before


def _rewrite(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[:-4] + bytes(4))
    os.utime(file, ns=(1, 1))


def _copy_over(file: Path) -> None:
    shutil.copy2(file, file.with_suffix(".copy"))
    file.with_suffix(".copy").replace(file)


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "rewritten": (_rewrite, r"has changed since \(its time of modification\)"),
    "replaced": (_copy_over, r"has changed since \(another file has its place\)"),
    "cut": (lambda file: file.write_bytes(file.read_bytes()[:-1]), r"has changed since \(from \d+ to \d+ bytes\)"),
    "moved": (lambda file: file.rename(file.with_name("other.safetensors")), r"other.safetensors has come since"),
    "gone": (lambda file: file.unlink(), r"holds no \.safetensors file"),
    "folder": (lambda file: shutil.rmtree(file.parent), r"holds no \.safetensors file"),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_model_does_not_wake_with_other_weights_than_those_that_slept(kind: str, tmp_path: Path) -> None:
    folder, saved = write_checkpoint("llama-gqa", tmp_path / "it"), tmp_path / "saved"
    engine, file = sleeping_engine(folder), folder / "model.safetensors"
    before, own = answers(engine), sleeper_of(engine)
    assert own.prepare()
    engine.scheduler.gate.forget_cache()
    own.sleep()
    os.link(file, saved)
    change, reason = CHANGES[kind]
    change(file)
    for wake in (own.check_wake, lambda: own.wake(lambda: None)):
        with pytest.raises(WeightsGoneError, match=rf"{reason}.*cb-backend update MODEL FOLDER"):
            wake()
    assert own.held_bytes == 0
    if kind not in ("rewritten", "cut"):
        folder.mkdir(exist_ok=True)
        saved.replace(file)  # it is back
        own.wake(lambda: None)
        assert answers(engine) == before


def test_a_file_that_changes_while_a_model_wakes_leaves_it_asleep(tmp_path: Path) -> None:
    folder = write_checkpoint("llama-gqa", tmp_path)
    engine = sleeping_engine(folder)
    own, file = sleeper_of(engine), folder / "model.safetensors"
    assert own.prepare()
    engine.scheduler.gate.forget_cache()
    own.sleep()
    with pytest.raises(WeightsGoneError, match="changed while it was read"):
        own.wake(lambda: os.utime(file, ns=(1, 1)))
    assert own.held_bytes == 0


@pytest.mark.parametrize("has_room", [True, False])
def test_weights_whose_files_have_changed_are_kept_when_the_model_falls_asleep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_room: bool
) -> None:
    """A checkpoint that is written anew in its place, or removed, while a model serves from it."""
    folder = write_checkpoint("llama-gqa", tmp_path / "one")
    engine = sleeping_engine(folder)
    before, places = answers(engine), addresses(engine)
    noisy_copy(folder, tmp_path / "two", 0.5)
    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "two", folder)
    if not has_room:
        assert sleeper_of(engine).prepare()
        monkeypatch.setattr(host_copy, "free_memory", lambda device: (0, 0))
        with pytest.raises(WeightsGoneError, match="has changed since"):
            sleep_and_wake(engine)
        return
    for _ in range(2):
        sleep_and_wake(engine)
        assert (answers(engine), addresses(engine)) == (before, places)
    own = sleeper_of(engine)
    engine.scheduler.gate.change_weights(b"", own.update(folder, lambda: None))
    expected = answers(sleeping_engine(folder))
    assert expected != before
    sleep_and_wake(engine)
    assert answers(engine) == expected


@pytest.mark.parametrize("where", ["files", "host"])
def test_an_update_wakes_a_model_without_its_old_weights(where: str, two: tuple[Path, Path]) -> None:
    old, new = two
    expected = answers(sleeping_engine(new))
    engine = sleeping_engine(old, where)
    own = sleeper_of(engine)
    while not own.prepare():
        pass
    before = answers(engine)
    engine.scheduler.gate.forget_cache()
    own.sleep()
    if where == "files":
        shutil.rmtree(old)
        with pytest.raises(WeightsGoneError):
            own.wake(lambda: None)
    own.wake(lambda: None, is_filled=False)
    if where == "host":  # an update that fails has a copy to come back to
        own.undo_update(lambda: None)
        assert answers(engine) == before
    else:
        with pytest.raises(ConfigError):
            own.undo_update(lambda: None)
    engine.scheduler.gate.change_weights(b"", own.update(new, lambda: None))
    assert answers(engine) == expected


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


# ---- other weights --------------------------------------------------------------------------------------------------


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    """Checkpoints of one specification."""
    folder = write_checkpoint("llama-gqa", tmp_path / "one")
    return folder, noisy_copy(folder, tmp_path / "two", 0.5)


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
