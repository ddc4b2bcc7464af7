"""A model that sleeps and wakes without memory of the card or of the host, or without the files it was read from."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cb_backend.contracts.errors import ConfigError
from cb_backend.contracts.rest import NoRoomError, WeightsGoneError
from cb_backend.engine.llm_engine import LLMEngine
from cb_backend.engine.runner import host_copy, memory_range, sleeper
from cb_backend.engine.runner.sleeper import RunnerSleeper
from tests.engine.sleeping_engine import addresses, answers, sleep_and_wake, sleeper_of, sleeping_engine, two
from tests.models.noisy_copy import noisy_copy
from tests.models.tiny_checkpoints import write_checkpoint

__all__ = ["two"]  # a fixture


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
