"""In which order a runner of several ranks ends, and what is left of it when a part of its end fails."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cb_backend.contracts.config import EngineConfig
from cb_backend.contracts.errors import ConfigError
from cb_backend.engine.runner import ranks
from cb_backend.engine.runner.ranks import RankedRunner
from cb_backend.engine.workers import RING_FILE, Workers, arrival


class Ended:
    """Notes who ends, in order; `failing` fails at it."""

    def __init__(self, failing: str = "") -> None:
        self.failing, self.order = failing, []

    def end(self, name: str) -> Any:
        def note() -> None:
            self.order.append(name)
            if name == self.failing:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")

        return note

    def runner(self) -> RankedRunner:
        runner: Any = SimpleNamespace(adapters=None, close=self.end("graphs"))
        workers: Any = SimpleNamespace(end=self.end("ranks"), forget_folder=self.end("folder"))
        ring: Any = SimpleNamespace(close=self.end("ring"))
        group: Any = SimpleNamespace(leave=self.end("group"))
        return RankedRunner(runner, workers, ring, group)


def test_graphs_go_before_the_group_and_its_file_goes_last() -> None:
    ended = Ended()
    ended.runner().close()
    assert ended.order == ["ranks", "ring", "graphs", "group", "folder"]


@pytest.mark.parametrize("failing", ["ring", "graphs", "group"])
def test_the_folder_goes_whatever_fails(failing: str) -> None:
    ended = Ended(failing)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        ended.runner().close()
    assert ended.order[-1] == "folder"


def test_when_all_have_loaded_their_file_alone_is_left() -> None:
    workers = Workers(EngineConfig(model="m", tensor_parallel_size=3))
    for path in (workers.folder / RING_FILE, workers.folder / "ranks", *(arrival(workers.folder, n) for n in (1, 2))):
        path.touch()
    workers.tidy_folder()
    assert [path.name for path in workers.folder.iterdir()] == ["ranks"]
    workers.forget_folder()
    assert not workers.folder.exists()


def test_a_second_group_on_gpus_is_refused_before_there_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(ranks, "_take_device", lambda config, rank: torch.device("cuda", rank))
    monkeypatch.setattr(ranks, "read_model_config", lambda folder: None)
    monkeypatch.setattr(ranks, "check_shares", lambda *_, **__: None)
    monkeypatch.setattr(ranks, "resolve_checkpoint", lambda model: model)
    monkeypatch.setattr(ranks.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(ranks, "Workers", start)
    with pytest.raises(ConfigError, match=r"group of torch\.distributed already .* close that first"):
        ranks.create_ranked(EngineConfig(model="m", tensor_parallel_size=2))
