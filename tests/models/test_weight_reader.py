"""Bytes of files to tensors: equal to what the safetensors library reads. Damage: `test_damaged_weights`."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cb_backend.models import weight_reader
from cb_backend.models.safetensors_files import ITEM_SIZES, StoredTensor, read_header
from cb_backend.models.weight_reader import DTYPES, Read, read_tensor, read_tensors

CPU = torch.device("cpu")
SHAPES = ((), (1,), (0,), (0, 5), (7,), (3, 5), (33, 65), (2, 3, 5), (1, 1, 129), (257,))


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_reader, "PIECE_BYTES", 256)


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if dtype.is_floating_point:
        return torch.randn(shape).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 100, shape).to(dtype)


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """A file with tensors of every shape in every type."""
    tensors = {
        f"{name}.{'x'.join(map(str, shape)) or 'number'}": random_tensor(shape, dtype)
        for name, dtype in DTYPES.items()
        for shape in SHAPES
    }
    save_file(tensors, tmp_path / "many.safetensors", metadata={"format": "pt"})
    return tmp_path / "many.safetensors"


def same(one: Tensor, other: Tensor) -> bool:
    """Bit by bit: some types of elements cannot be compared."""
    flat = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other))
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*flat)


@pytest.mark.parametrize("num_lanes", [1, 3])
def test_whole_tensors_are_those_of_the_library(many: Path, num_lanes: int) -> None:
    found: dict[str, Tensor] = {}
    stored = read_header(many)
    reads = [
        Read(each.name, each, take=lambda tensor, name=each.name: found.__setitem__(name, tensor)) for each in stored
    ]
    read_tensors(reads, CPU, num_lanes=num_lanes)
    expected = load_file(many)
    assert found.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not same(tensor, found[name])] == []


@pytest.mark.parametrize("num_lanes", [1, 3])
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.float16, torch.bfloat16, torch.int64])
def test_copied_elements_are_those_that_torch_casts(many: Path, num_lanes: int, dtype: torch.dtype | None) -> None:
    expected = load_file(many)
    targets = {name: torch.empty_like(tensor, dtype=dtype or tensor.dtype) for name, tensor in expected.items()}
    read_tensors([Read(each.name, each, targets[each.name]) for each in read_header(many)], CPU, num_lanes=num_lanes)
    assert [name for name, tensor in expected.items() if not same(tensor.to(targets[name].dtype), targets[name])] == []


def test_targets_made_in_inference_mode_are_filled(many: Path) -> None:
    expected = load_file(many)
    with torch.inference_mode():
        targets = {name: torch.empty_like(tensor) for name, tensor in expected.items()}
        read_tensors([Read(each.name, each, targets[each.name]) for each in read_header(many)], CPU, num_lanes=2)
        assert [name for name, tensor in expected.items() if not same(tensor, targets[name])] == []


def test_rows_of_a_tensor_are_read_alone(many: Path) -> None:
    stored = next(each for each in read_header(many) if each.name == "BF16.33x65")
    part = read_tensor(stored.rows(5, 20))
    assert same(part, load_file(many)["BF16.33x65"][5:25])
    assert stored.rows(5, 20).num_bytes == 20 * 65 * 2


def test_copied_and_whole_ones_of_several_files_count_every_byte(tmp_path: Path) -> None:
    reads, found, expected = [], {}, {}
    for number in range(3):
        path = tmp_path / f"{number}.safetensors"
        save_file({f"{number}.{each}": torch.randn(100, 3 + each) for each in range(4)}, path)
        expected |= load_file(path)
        for each in read_header(path):
            target = found[each.name] = torch.zeros(each.shape)
            reads.append(
                Read(each.name, each, target) if each.name.endswith("1") else Read(each.name, each, take=target.copy_)
            )
    seen: list[tuple[int, int]] = []
    read_tensors(reads, CPU, lambda *bytes_read: seen.append(bytes_read), num_lanes=2)
    assert all(same(found[name], tensor) for name, tensor in expected.items())
    total = sum(tensor.nbytes for tensor in expected.values())
    assert seen[-1] == (total, total)
    assert len(seen) == sum(-(-tensor.nbytes // 256) for tensor in expected.values())


@pytest.mark.parametrize("gap", [(1 << 32) - 8, 1 << 32, 5 << 30])
def test_places_beyond_four_gibibytes(tmp_path: Path, gap: int) -> None:
    """A sparse file: its first tensor is a hole."""
    path, values = tmp_path / "large.safetensors", torch.arange(1000, dtype=torch.int32)
    header = json.dumps(
        {
            "hole": {"dtype": "U8", "shape": [gap], "data_offsets": [0, gap]},
            "values": {"dtype": "I32", "shape": [1000], "data_offsets": [gap, gap + 4000]},
        }
    ).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.seek(gap, os.SEEK_CUR)
        file.write(values.numpy().tobytes())
    hole, stored = read_header(path)
    assert stored.offset == 8 + len(header) + gap
    assert torch.equal(read_tensor(stored), values)
    assert torch.equal(read_tensor(hole.rows(gap - 3000, 3000)), torch.zeros(3000, dtype=torch.uint8))


def test_files_larger_than_a_third_of_memory_leave_the_page_cache(many: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dropped: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda file, offset, size, advice: dropped.append((offset, size)))
    stored = [each for each in read_header(many) if each.num_bytes]
    reads = [Read(each.name, each, torch.empty(each.shape, dtype=DTYPES[each.dtype])) for each in stored]
    read_tensors(reads, CPU)
    assert not dropped
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 2, "SC_PAGE_SIZE": many.stat().st_size}.__getitem__)
    read_tensors(reads, CPU)
    assert sum(size for _, size in dropped) == sum(each.num_bytes for each in stored)
    assert min(offset for offset, _ in dropped) == stored[0].offset


def test_sizes_are_those_of_the_types() -> None:
    assert {name: dtype.itemsize for name, dtype in DTYPES.items()}.items() <= ITEM_SIZES.items()


def test_the_order_of_places_is_that_of_the_library(many: Path) -> None:
    tensors: list[StoredTensor] = read_header(many)
    assert all(one.offset + one.num_bytes == other.offset for one, other in itertools.pairwise(tensors))
    assert tensors[-1].offset + tensors[-1].num_bytes == many.stat().st_size
