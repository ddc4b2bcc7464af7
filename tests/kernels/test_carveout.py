"""Shared memory for the programs that there are: how much, and that the driver is told of it once."""

from __future__ import annotations

import ctypes
from collections import namedtuple
from typing import Any

import pytest
import torch

from cb_backend.kernels import carveout, decode_attention
from cb_backend.kernels.carveout import Programs
from cb_backend.kernels.decode_plan import programs_each

MOST = 228 << 10  # bytes of a multiprocessor of compute capability 9.0
CUDA = torch.device("cuda")
Metadata = namedtuple("Metadata", "shared")  # as Triton's


class Driver:
    def __init__(self) -> None:
        self.calls: list[tuple[int, int, int]] = []
        self.result = 0  # CUDA_SUCCESS

    def cuFuncSetAttribute(self, function: Any, attribute: int, value: int) -> int:  # noqa: N802  # CUDA's name
        self.calls.append((function.value, attribute, value))
        return self.result


class Compiled:
    def __init__(self, function: int | None, shared: int) -> None:
        self.function, self.metadata = function, Metadata(shared)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(carveout, "_driver", lambda: driver)
    monkeypatch.setattr(carveout, "_chosen", {})
    monkeypatch.setattr(carveout, "max_shared_bytes", lambda device: 227 << 10)
    return driver


@pytest.mark.parametrize(
    ("program_bytes", "usual", "most", "percent"),
    [
        (19456, 1, 1, 9),
        (19456, 2, 2, 18),  # two programs of 20 KiB
        (19456, 4, 5, 44),  # uneven rows have one more, which fits beside them
        (19456, 11, 11, 97),  # as many as there is room for
        (19456, 11, 12, 97),
        (19456, 12, 12, 53),  # one more: two rounds of six, not of eleven and one
        (19456, 16, 17, 71),
        (37888, 2, 3, 50),
        (54272, 4, 5, 95),
        (54272, 16, 17, 95),  # four rounds of four
        (227 << 10, 1, 1, 100),
        (227 << 10, 9, 9, 100),  # one after the other
        (MOST, 1, 1, 100),  # more than there is: Triton says so
        (0, 1, 1, 1),
    ],
)
def test_as_few_programs_as_need_no_more_rounds(program_bytes: int, usual: int, most: int, percent: int) -> None:
    assert carveout.carveout(program_bytes, Programs(usual, most), MOST) == percent


def test_the_driver_is_told_of_changes_alone(driver: Driver) -> None:
    first, second = Compiled(0x10, 19456), Compiled(0x20, 19456)
    for compiled, programs in ((first, 2), (first, 2), (second, 2), (first, 4), (first, 2)):
        carveout.make_room_for(compiled, Programs(programs, programs), CUDA)
    assert driver.calls == [(0x10, 9, 18), (0x20, 9, 18), (0x10, 9, 36), (0x10, 9, 18)]


def test_what_the_driver_does_not_take_is_tried_again(driver: Driver) -> None:
    driver.result = 1
    carveout.make_room_for(Compiled(0x10, 19456), Programs(2, 2), CUDA)
    driver.result = 0
    for _ in range(2):
        carveout.make_room_for(Compiled(0x10, 19456), Programs(2, 2), CUDA)
    assert driver.calls == 2 * [(0x10, 9, 18)]


def test_nothing_loaded_and_no_gpu_have_no_driver(driver: Driver) -> None:
    carveout.make_room_for(None, Programs(2, 2), CUDA)  # a rehearsal
    carveout.make_room_for(Compiled(None, 19456), Programs(2, 2), CUDA)  # of what was compiled before, but not loaded
    carveout.make_room_for(Compiled(0x10, 19456), Programs(2, 2), torch.device("cpu"))
    assert driver.calls == []


@pytest.mark.parametrize(
    ("num_rows", "ctas_per_sm", "programs"),
    [(1, 2, (2, 2)), (1, 1, (1, 1)), (8, 4, (4, 4)), (32, 1, (2, 3)), (64, 1, (4, 5)), (256, 3, (16, 19))],
)
def test_programs_are_those_of_the_plan_or_one_a_row(
    num_rows: int, ctas_per_sm: int, programs: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cb_backend.kernels.decode_plan.num_multiprocessors", lambda device: 132)
    cache = torch.empty(4, 2, 8, 16, 64)  # eight KV heads
    assert programs_each(num_rows, cache, {"ctas_per_sm": ctas_per_sm}) == programs


def test_decode_attention_tells_how_many_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[Any, Programs]] = []
    monkeypatch.setattr(decode_attention, "needs_twin", lambda tensor: False)
    monkeypatch.setattr(decode_attention, "plan_decode", lambda *_: torch.zeros(1))
    monkeypatch.setattr(decode_attention, "decode_parameters", lambda *_: {
        "block_n": 32, "num_warps": 2, "num_stages": 3, "ctas_per_sm": 3, "min_split": 64,
    })  # fmt: skip
    monkeypatch.setattr(
        decode_attention, "make_room_for", lambda compiled, programs, device: told.append((compiled, programs))
    )

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *_, **__: "compiled"

    monkeypatch.setattr(decode_attention, "_decode_attention_kernel", Kernel())
    monkeypatch.setattr("cb_backend.kernels.decode_plan.num_multiprocessors", lambda device: 132)
    rows = torch.zeros(1, dtype=torch.int32)
    decode_attention.decode_attention(
        torch.zeros(1, 32, 64), torch.zeros(2, 2, 8, 16, 64), torch.zeros(1, 4, dtype=torch.int32), rows, rows, 0.1
    )
    assert told == [("compiled", Programs(3, 3))]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_driver_has_what_it_was_told() -> None:
    q, cache = torch.zeros(1, 32, 64, device=CUDA), torch.zeros(2, 2, 8, 16, 64, device=CUDA)
    rows = torch.zeros(1, dtype=torch.int32, device=CUDA)
    decode_attention.decode_attention(q, cache, torch.zeros(1, 4, dtype=torch.int32, device=CUDA), rows, rows + 1, 0.1)
    assert carveout._chosen
    for function, percent in carveout._chosen.items():
        value = ctypes.c_int()
        code = carveout._driver().cuFuncGetAttribute(ctypes.byref(value), 9, ctypes.c_void_p(function))
        assert (code, value.value) == (0, percent)
