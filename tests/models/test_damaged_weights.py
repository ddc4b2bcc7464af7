"""Files of weights that are damaged, odd or change while they are read: no damage goes unnamed."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from cb_backend.contracts.errors import ConfigError
from cb_backend.models.safetensors_files import read_header
from cb_backend.models.weight_reader import Read, read_tensors
from tests.models.test_weight_reader import CPU, _small_pieces

__all__ = ["_small_pieces"]  # a fixture


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


def test_an_empty_file_of_tensors_and_one_of_metadata_alone(tmp_path: Path) -> None:
    assert read_header(written(tmp_path / "empty.safetensors", {}, 0)) == []
    assert read_header(written(tmp_path / "note.safetensors", {"__metadata__": {"format": "pt"}}, 0)) == []
    read_tensors([], CPU)
