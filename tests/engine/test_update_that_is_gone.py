"""Weights of an update that an engine finds spoilt when it starts again: told in time, and shown."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from cb_backend.cli.status import _rest_text
from cb_backend.cli.terminal.local_state import EngineState
from cb_backend.contracts.config import EngineConfig
from cb_backend.engine.rest_desk import KeptWeights, begin_start
from cb_backend.engine.runner.runner_factory import fault_of_update
from tests.models.test_published_configs import write_tokenizer
from tests.models.tiny_checkpoints import write_checkpoint

FILE = "model.safetensors"


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(write_checkpoint("llama-gqa", tmp_path_factory.mktemp("own")), eos_id=1)


@pytest.fixture
def update(own: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(own, tmp_path / "update"))


def change_config(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1000])


SPOILT: dict[str, tuple[Callable[[Path], object], str]] = {
    "deleted": (shutil.rmtree, "config.json"),
    "no weights": (lambda folder: (folder / FILE).unlink(), "safetensors"),
    "half written": (lambda folder: cut(folder / FILE), FILE),
    "an empty file": (lambda folder: (folder / FILE).write_bytes(b""), FILE),
    "half a config": (lambda folder: cut(folder / "config.json"), "config.json"),
    "other sizes": (lambda folder: change_config(folder, num_hidden_layers=3), "another specification: "),
    "other positions": (lambda folder: change_config(folder, rms_norm_eps=0.5), "another specification: "),
    "another tokenizer": (lambda folder: (folder / "tokenizer.json").write_text("{}"), "tokenizer"),
}


def config_of(own: Path) -> EngineConfig:
    return EngineConfig(model=str(own), device="cpu", idle_sleep_s=0.0, kv_cache_memory_bytes=1 << 20)


@pytest.mark.parametrize("how", SPOILT)
def test_the_model_starts_with_its_own_weights_and_tells_it(
    how: str, own: Path, update: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = tmp_path / "copies" / "1"
    runtime.mkdir(parents=True)
    KeptWeights(runtime).keep(str(update))
    spoil, reason = SPOILT[how]
    spoil(update)
    start = begin_start(config_of(own), runtime)
    assert start.weights is None
    assert f"the weights of {update}, which an update had brought, cannot be loaded any more: " in start.kept.lost
    assert reason in start.kept.lost
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert start.kept.lost in record.getMessage()
    assert begin_start(config_of(own), runtime).kept.lost == start.kept.lost, "the next engine tells it too"


def test_what_can_be_loaded_is(own: Path, update: Path, tmp_path: Path) -> None:
    runtime = tmp_path / "copies" / "1"
    runtime.mkdir(parents=True)
    KeptWeights(runtime).keep(str(update))
    start = begin_start(config_of(own), runtime)
    assert (start.weights, start.kept.lost) == (update, "")


def test_a_fault_of_the_model_itself_is_not_the_updates(own: Path, update: Path, tmp_path: Path) -> None:
    """Else the update would be forgotten for what it cannot help."""
    broken = Path(shutil.copytree(own, tmp_path / "broken"))
    cut(broken / "config.json")
    assert fault_of_update(config_of(broken), update) == ""


def test_status_shows_it() -> None:
    engine = EngineState(1, "m", "llm", lost_update="the weights of /x cannot be loaded any more")
    assert "weights of model.json: the weights of /x cannot be loaded any more" in _rest_text(engine)
