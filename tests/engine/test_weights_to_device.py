"""Weights on their way to a GPU: through pieces of pinned memory, none of which changes while it is being copied."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cb_backend.contracts.errors import ConfigError
from cb_backend.models import read_lane, weight_reader
from cb_backend.models.read_lane import ReadLane
from cb_backend.models.safetensors_files import read_header
from cb_backend.models.weight_reader import Read, read_tensors
from tests.engine.fake_cuda import CPU, CUDA, FakeCuda
from tests.engine.fake_device import fake_device

NUM_BYTES = 512  # of a piece


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    monkeypatch.setattr(weight_reader, "PIECE_BYTES", NUM_BYTES)
    with fake_device(monkeypatch) as fake:
        yield fake


@pytest.fixture
def path(tmp_path: Path) -> Path:
    sizes = {"small": (3,), "number": (), "even": (64, 16), "odd": (33, 31), "tall": (1001, 1)}
    tensors = {f"{name}.{dtype}": torch.randn(size).to(dtype) for name, size in sizes.items()
               for dtype in (torch.float32, torch.bfloat16, torch.float16)}  # fmt: skip
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


@pytest.mark.parametrize("num_lanes", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copied_cast_and_whole_tensors_arrive(path: Path, fake: FakeCuda, num_lanes: int, dtype: torch.dtype) -> None:
    expected, found, reads = load_file(path), {}, []
    for index, stored in enumerate(read_header(path)):
        target = found[stored.name] = torch.zeros(stored.shape, dtype=dtype, device=CUDA)
        is_whole = index % 3 == 0
        reads.append(Read(stored.name, stored, None if is_whole else target, target.copy_ if is_whole else None))
    read_tensors(reads, CUDA, num_lanes=num_lanes)
    fake.settle(fake.now)
    assert fake.mistakes == []
    for name, tensor in expected.items():
        assert found[name].is_cuda
        assert torch.equal(found[name], tensor.to(CUDA).to(dtype)), name


def test_readers_never_wait_for_the_device_but_for_their_pieces(path: Path, fake: FakeCuda) -> None:
    reads = [
        Read(stored.name, stored, torch.zeros(stored.shape, dtype=torch.bfloat16, device=CUDA))
        for stored in read_header(path)
    ]
    fake.waits.clear()
    read_tensors(reads, CUDA, num_lanes=1)
    assert fake.waits == []


def test_a_piece_that_is_not_waited_for_is_a_mistake(
    path: Path, fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other way round: the stand-in for the device sees what the events are for."""
    monkeypatch.setattr(torch.cuda.Event, "synchronize", lambda event: None)
    reads = [Read(each.name, each, torch.zeros(each.shape, device=CUDA)) for each in read_header(path)]
    read_tensors(reads, CUDA, num_lanes=1)
    fake.settle(fake.now)
    assert any("changed before the copy was done" in mistake for mistake in fake.mistakes)


def test_pinned_memory_is_two_pieces_a_thread(path: Path, fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    made = ReadLane.__init__

    def counted(lane: ReadLane, *args: Any) -> None:
        made(lane, *args)
        sizes.extend(len(each) for each in lane._host)

    monkeypatch.setattr(ReadLane, "__init__", counted)
    reads = [Read(each.name, each, torch.zeros(each.shape, device=CUDA)) for each in read_header(path)]
    read_tensors(reads, CUDA, num_lanes=3)
    assert sizes == [NUM_BYTES] * 2 * 3
    assert read_lane.PIECE_BYTES == 16 << 20


def test_tensors_that_are_taken_whole_are_few_at_a_time(path: Path, fake: FakeCuda) -> None:
    """What they take on the device is beside the weights."""
    asked, alive, most = [], [0], [0]
    made = torch.empty

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        asked.append(args)
        alive[0] += 1
        most[0] = max(most[0], alive[0])
        return made(*args, **kwargs)

    def take(tensor: Tensor) -> None:
        alive[0] -= 1

    reads = [Read(each.name, each, take=take) for each in read_header(path)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_reader.torch, "empty", counted)
        read_tensors(reads, CPU, num_lanes=3)
    assert len(asked) == len(reads)
    assert most[0] <= 2


def test_a_reader_that_fails_ends_all_of_them(path: Path, fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = [Read(each.name, each, torch.zeros(each.shape, device=CUDA)) for each in read_header(path)]
    monkeypatch.setattr(read_lane.os, "preadv", lambda *_: 0)
    before = threading.active_count()
    with pytest.raises(ConfigError, match=r"ends at byte \d+, but tensor \S+ goes from"):
        read_tensors(reads, CUDA, num_lanes=2)
    assert threading.active_count() == before
