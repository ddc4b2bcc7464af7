"""Bytes of files to tensors: equal to what the safetensors library reads, and no damage goes unnamed."""

from __future__ import annotations

import itertools
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cb_backend.contracts.errors import ConfigError
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


# ---- damage --------------------------------------------------------------------------------------------------------


def cut_off(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 100)


def grow(path: Path) -> None:
    path.open("ab").write(b"more")


def touch(path: Path) -> None:
    os.utime(path, ns=(1, 1))


def replace(path: Path) -> None:
    copy = path.with_suffix(".new")
    copy.write_bytes(path.read_bytes())
    os.utime(copy, ns=(path.stat().st_mtime_ns,) * 2)
    copy.replace(path)


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    save_file({"first": torch.randn(50, 20), "second": torch.randn(40, 10)}, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def reads_of(path: Path, is_copied: bool) -> list[Read]:
    return [
        Read(each.name, each, torch.empty(each.shape)) if is_copied else Read(each.name, each, take=lambda tensor: None)
        for each in read_header(path)
    ]


@pytest.mark.parametrize("is_copied", [True, False])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (cut_off, r"^model\.safetensors changed while it was read \(from (\d+) to \d+ bytes\); start again"),
        (grow, r"^model\.safetensors changed while it was read \(from (\d+) to \d+ bytes\)"),
        (touch, r"^model\.safetensors changed while it was read \(its time of modification\)"),
        (replace, r"^model\.safetensors changed while it was read \(another file has its place\)"),
        (Path.unlink, r"^model\.safetensors, which holds tensor first, cannot be opened any more \(No such file"),
    ],
)
def test_a_file_that_changed_since_its_header(
    plain: Path, is_copied: bool, change: Callable[[Path], None], message: str
) -> None:
    reads = reads_of(plain, is_copied)
    change(plain)
    with pytest.raises(ConfigError, match=message):
        read_tensors(reads, CPU)


@pytest.mark.parametrize("is_copied", [True, False])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda path: os.truncate(path, 400),
            r"^model\.safetensors ends at byte 400, but tensor first goes from \d+ to \d+; fetch",
        ),
        (grow, r"changed while it was read"),
        (touch, r"changed while it was read"),
    ],
)
def test_a_file_that_changes_while_it_is_read(
    plain: Path, is_copied: bool, change: Callable[[Path], None], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = []
    preadv = os.preadv

    def read_then_change(file: int, buffers: list[memoryview], offset: int) -> int:
        count = preadv(file, buffers, offset)
        if not pieces:
            change(plain)
        pieces.append(count)
        return count

    reads = reads_of(plain, is_copied)
    monkeypatch.setattr(os, "preadv", read_then_change)
    before = threading.active_count()
    with pytest.raises(ConfigError, match=message):
        read_tensors(reads, CPU, num_lanes=1)
    assert threading.active_count() == before


def test_a_disk_that_fails_is_named_with_tensor_and_place(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(
        ConfigError, match=r"cannot be read to its end: 256 bytes of tensor first at \d+ \(Input/output"
    ):
        read_tensors(reads_of(plain, True), CPU)


def test_what_a_taker_raises_ends_the_reading(plain: Path) -> None:
    def refuse(tensor: Tensor) -> None:
        raise ConfigError("not this one")

    reads = [
        read if read.name == "first" else Read(read.name, read.stored, take=refuse) for read in reads_of(plain, True)
    ]
    with pytest.raises(ConfigError, match="not this one"):
        read_tensors(reads, CPU, num_lanes=3)


def written(path: Path, entries: object, num_bytes: int) -> Path:
    header = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(num_bytes))
    return path


def entry(first: int, last: int, shape: object = (2,), dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, last]}


@pytest.mark.parametrize(
    ("entries", "num_bytes", "reason"),
    [
        (
            {"a": entry(0, 8), "b": entry(8, 16)},
            12,
            r"tensor b would end at byte \d+, the file has \d+: it should have",
        ),
        ({"a": entry(0, 8), "b": entry(8, 16)}, 0, r"tensor a would end at byte"),
        ({"a": entry(0, 8)}, 9, r"its tensors end at byte \d+, the file has \d+\)"),
        (
            {"a": entry(0, 8), "b": entry(4, 12)},
            12,
            "tensor b begins at byte 4 of the data, the one before it ends at 8",
        ),
        ({"a": entry(0, 8), "b": entry(9, 17)}, 17, "tensor b begins at byte 9"),
        ({"a": entry(0, 8, (3,))}, 8, r"tensor a, F32 \[3\], has 8 bytes"),
        ({"a": entry(0, 8, (-2,))}, 8, "tensor a is described as"),
        ({"a": entry(8, 0)}, 8, "tensor a is described as"),
        ({"a": entry(0, 8, None)}, 8, "tensor a is described as"),
        ({"a": [1]}, 8, "tensor a is described as"),
        ({"a": {"shape": [2], "data_offsets": [0, 8]}}, 8, "tensor a is described as"),
        ([1], 8, "its header is no JSON object"),
        (b"{nonsense", 8, "its header is no JSON"),
    ],
)
def test_a_header_that_contradicts_itself(tmp_path: Path, entries: object, num_bytes: int, reason: str) -> None:
    path = written(tmp_path / "odd.safetensors", entries, num_bytes)
    with pytest.raises(ConfigError, match=rf"^odd\.safetensors is not a whole safetensors file \({reason}.*fetch the"):
        read_header(path)


def test_types_that_nobody_reads_have_a_place_all_the_same(tmp_path: Path) -> None:
    path = written(tmp_path / "new.safetensors", {"a": entry(0, 3, (6,), "F4"), "b": entry(3, 11)}, 11)
    assert [(each.name, each.dtype, each.num_bytes) for each in read_header(path)] == [("a", "F4", 3), ("b", "F32", 8)]


def test_sizes_are_those_of_the_types() -> None:
    assert {name: dtype.itemsize for name, dtype in DTYPES.items()}.items() <= ITEM_SIZES.items()


def test_an_empty_file_of_tensors_and_one_of_metadata_alone(tmp_path: Path) -> None:
    assert read_header(written(tmp_path / "empty.safetensors", {}, 0)) == []
    assert read_header(written(tmp_path / "note.safetensors", {"__metadata__": {"format": "pt"}}, 0)) == []
    read_tensors([], CPU)


def test_the_order_of_places_is_that_of_the_library(many: Path) -> None:
    tensors: list[StoredTensor] = read_header(many)
    assert all(one.offset + one.num_bytes == other.offset for one, other in itertools.pairwise(tensors))
    assert tensors[-1].offset + tensors[-1].num_bytes == many.stat().st_size
