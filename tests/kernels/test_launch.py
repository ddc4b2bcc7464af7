"""Launch parameters as data: which entry serves a launch, and that every op has one for every head size."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
import torch

from cb_backend.kernels import launch
from cb_backend.kernels.fp8 import FP8

CPU = torch.device("cpu")


@pytest.fixture
def tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in place of `tuned`, and nothing remembered."""
    monkeypatch.setattr(launch, "TUNED", tmp_path)
    monkeypatch.setattr(launch, "tuned_files", lambda device: ("some-gpu.json", "default.json"))
    monkeypatch.setattr(launch, "_products", set())
    for cached in (launch._read, launch._tuned_parameters):
        cached.cache_clear()
    yield tmp_path
    for cached in (launch._read, launch._tuned_parameters):
        cached.cache_clear()


def test_gpu_file_goes_before_default_and_conditions_select(tuned: Path) -> None:
    default = {"op": [{"when": {"block_d": 64}, "use": {"n": 1}}, {"use": {"n": 2}}], "other": [{"use": {"n": 3}}]}
    (tuned / "default.json").write_text(json.dumps(default))
    (tuned / "some-gpu.json").write_text(json.dumps({"op": [{"when": {"block_d": 128}, "use": {"n": 4}}]}))
    assert launch.launch_parameters("op", CPU, block_d=64) == {"n": 1}
    assert launch.launch_parameters("op", CPU, block_d=128) == {"n": 4}
    assert launch.launch_parameters("op", CPU, block_d=256) == {"n": 2}
    assert launch.launch_parameters("other", CPU) == {"n": 3}
    with launch.overriding("other", {"n": 5}):
        assert launch.launch_parameters("other", CPU) == {"n": 5}
    assert launch.launch_parameters("other", CPU) == {"n": 3}
    with pytest.raises(KeyError, match="no launch parameters for missing"):
        launch.launch_parameters("missing", CPU)


def test_products_without_an_entry_of_the_gpu_are_told(tuned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once each, whatever the rows; what has an entry for some rows was searched, and other ops have no shapes."""
    monkeypatch.setattr(launch, "max_shared_bytes", lambda device: 1 << 30)
    default = {"linear": [{"use": {"n": 1}}], "grouped_down": [{"use": {"n": 2}}], "sample": [{"use": {"n": 3}}]}
    (tuned / "default.json").write_text(json.dumps(default))
    own = {
        "linear": [{"when": {"n": 64, "k": 32, "m": 4}, "use": {"n": 4}}],
        "grouped_down": [{"when": {"m": 16}, "use": {}}],
    }
    (tuned / "some-gpu.json").write_text(json.dumps(own))
    gpu = torch.device("cuda")
    for device in (gpu, CPU):
        for m in (1, 4, 8):
            launch.launch_parameters("linear", device, n=64, k=32, m=m)
            launch.launch_parameters("grouped_down", device, n=8, k=16, e=4, m=m)
            launch.launch_parameters("sample", device)
        assert launch.products_on_defaults(CPU) == []
    assert launch.products_on_defaults(gpu) == ["grouped_down n=8 k=16 e=4"]
    launch.launch_parameters("linear", gpu, n=32, k=64, m=1)
    assert launch.products_on_defaults(gpu) == ["grouped_down n=8 k=16 e=4", "linear n=32 k=64"]


def test_overrides_hold_for_the_conditions_they_name_and_the_inner_one_goes_first(tuned: Path) -> None:
    (tuned / "default.json").write_text(json.dumps({"op": [{"use": {"n": 1}}], "other": [{"use": {"n": 2}}]}))

    def used(op: str = "op", **conditions: int) -> int:
        return launch.launch_parameters(op, CPU, **conditions)["n"]

    with launch.overriding("op", {"n": 3}, k=8):
        with launch.overriding("op", {"n": 4}, k=8, m=1), launch.overriding("other", {"n": 5}, k=8):
            assert (used(k=8, m=1), used(k=8, m=2), used(k=9, m=1), used()) == (4, 3, 1, 1)
            assert (used("other", k=8), used("other", k=9)) == (5, 2)
        assert (used(k=8, m=1), used("other", k=8)) == (3, 2)
        with contextlib.suppress(ValueError), launch.overriding("op", {"n": 6}):
            assert (used(k=8), used(k=9)) == (6, 6)
            raise ValueError
        assert (used(k=8), used(k=9)) == (3, 1)
    assert used(k=8, m=1) == 1


def test_an_entry_that_does_not_fit_the_gpu_is_passed_over(tuned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "max_shared_bytes", lambda device: 100_000)
    entries = [{"shared_bytes": 131_072, "use": {"n": 1}}, {"shared_bytes": 98_304, "use": {"n": 2}}]
    (tuned / "default.json").write_text(json.dumps({"op": entries}))
    assert launch.launch_parameters("op", CPU) == {"n": 2}


@pytest.mark.parametrize("path", sorted(launch.TUNED.glob("*.json")), ids=lambda path: path.stem)
def test_files_hold_entries(path: Path) -> None:
    for op, entries in json.loads(path.read_text()).items():
        assert entries, op
        for entry in entries:
            assert entry.keys() <= {"when", "shared_bytes", "use", "by"}
            assert entry.get("by", "steps") == "steps"
            assert all(isinstance(value, int) and value > 0 for value in entry["use"].values())
    if path.stem == "default":
        for entries in json.loads(path.read_text()).values():
            assert "when" not in entries[-1]
            assert "shared_bytes" not in entries[-1]


def test_what_launchers_allocate_is_poisoned_in_these_tests(device: torch.device) -> None:
    floats = torch.empty(3, device=device)
    for memory in (floats, torch.empty_like(floats), floats.new_empty(2, 2)):
        assert memory.float().isnan().all()
    assert (torch.empty(3, dtype=torch.int32, device=device) < 0).all()
    assert torch.empty(3, dtype=torch.bool, device=device).all()
    assert torch.empty(3, dtype=FP8, device=device).float().isnan().all()
