"""Shrink and expand against plain arithmetic and against their twins: any mix of rows and adapters, none among them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from cb_backend.kernels import lora_expand as lora_expand_module
from cb_backend.kernels import lora_shrink as lora_shrink_module
from cb_backend.kernels.launch import overriding
from cb_backend.kernels.lora_expand import lora_expand, lora_expand_torch
from cb_backend.kernels.lora_plan import AdapterPlan, plan_adapters
from cb_backend.kernels.lora_shrink import lora_shrink, lora_shrink_torch

NOTHING = torch.zeros(0, dtype=torch.int32)
SMALL = {"block_k": 32, "block_r": 16, "num_warps": 4, "num_stages": 2}
WHOLE = {**SMALL, "block_k": 64}  # a split at once


@pytest.fixture(autouse=True)
def _many_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of inputs as small as these."""
    monkeypatch.setattr(lora_shrink_module, "_LEAST_SPLIT", 64)


def plan_of(adapters: list[int], max_adapters: int, device: torch.device, tile_rows: int = 16) -> AdapterPlan:
    """Of decode rows with these adapters."""
    slots = torch.arange(len(adapters), dtype=torch.int32, device=device)
    table = torch.tensor(adapters, dtype=torch.int32, device=device)
    nothing = NOTHING.to(device)
    with overriding("lora_plan", {"tile_rows": tile_rows}):
        return plan_adapters(slots, len(adapters), nothing, nothing, 0, table, max_adapters)


class Case:
    """Weights of a few adapters for slices of one input, as parts of one slab; and inputs."""

    def __init__(
        self,
        num_rows: int,
        in_size: int = 80,
        slices: tuple[int, ...] = (48, 16, 16),
        rank: int = 16,
        max_adapters: int = 5,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(num_rows + in_size)

        def normal(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator).to(dtype).to(device or "cpu")

        num_slices, out_size = len(slices), sum(slices)
        slab = normal(max_adapters, num_slices * rank * in_size + out_size * rank + 24)  # not only these in it
        a, b, _ = slab.split([num_slices * rank * in_size, out_size * rank, 24], dim=1)
        self.a = a.unflatten(1, (num_slices * rank, in_size))
        self.b = b.unflatten(1, (out_size, rank))
        self.scales = torch.rand(max_adapters, num_slices, generator=generator).to(device or "cpu") + 0.5
        self.slices, self.rank = slices, rank
        self.x, self.y = normal(num_rows, in_size), normal(num_rows, out_size)

    def expected(self, adapters: list[int]) -> Tensor:
        """In float64, row by row."""
        out = self.y.double().clone()
        for row, adapter in enumerate(adapters):
            if not 0 <= adapter < len(self.a):
                continue
            inner = self.a[adapter].double() @ self.x[row].double()
            begin = 0
            for index, size in enumerate(self.slices):
                own = inner[index * self.rank : (index + 1) * self.rank]
                added = self.b[adapter, begin : begin + size].double() @ own
                out[row, begin : begin + size] += self.scales[adapter, index].double() * added
                begin += size
        return out

    def run(self, plan: AdapterPlan, is_twin: bool = False) -> Tensor:
        shrink, expand = (lora_shrink_torch, lora_expand_torch) if is_twin else (lora_shrink, lora_expand)
        y = self.y.clone()
        expand(y, shrink(self.x, self.a, plan), self.b, self.scales, self.slices, plan)
        return y


@contextlib.contextmanager
def recorded(module: ModuleType, kernel: str) -> Iterator[list[dict[str, Any]]]:
    """The keyword arguments of a kernel's launches; nothing runs."""
    launches: list[dict[str, Any]] = []

    class Recorder:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *given, **options: launches.append(options)

    original = getattr(module, kernel)
    setattr(module, kernel, Recorder())
    try:
        yield launches
    finally:
        setattr(module, kernel, original)


def mixes(num_rows: int) -> dict[str, list[int]]:
    generator = torch.Generator().manual_seed(num_rows)
    return {
        "mixed": torch.randint(-1, 5, (num_rows,), generator=generator).tolist(),
        "none": [-1] * num_rows,
        "one for all": [4] * num_rows,
        "the last row alone": [-1] * (num_rows - 1) + [2],
    }


@pytest.mark.parametrize("mix", mixes(1))
@pytest.mark.parametrize("num_rows", [1, 2, 15, 16, 17, 31, 32, 33, 40])
@pytest.mark.parametrize("shrinking", [SMALL, WHOLE], ids=["blocks", "whole"])
def test_rows_get_what_their_adapter_adds(
    num_rows: int, mix: str, shrinking: dict[str, int], device: torch.device
) -> None:
    adapters = mixes(num_rows)[mix]
    case = Case(num_rows, device=device)
    expected = case.expected(adapters)
    with (
        overriding("lora_shrink", shrinking),
        overriding("lora_expand", {"block_n": 32, "block_r": 16, "num_warps": 4}),
    ):
        got = case.run(plan_of(adapters, 5, device))
    for y in (got, case.run(plan_of(adapters, 5, device), is_twin=True)):
        assert (y.double() - expected).abs().max() < 1e-4
        without = [row for row, adapter in enumerate(adapters) if adapter < 0]
        assert torch.equal(y[without], case.y[without]), "rows without an adapter are not touched"


@pytest.mark.parametrize(("in_size", "slices", "rank"), [
    (32, (40,), 16), (100, (8, 24), 32), (64, (130, 7, 3), 48), (257, (64, 64), 64), (16, (1,), 128),
])  # fmt: skip
@pytest.mark.parametrize("tile_rows", [16, 32, 64])
@pytest.mark.parametrize("shrinking", [SMALL, WHOLE], ids=["blocks", "whole"])
def test_sizes_on_both_sides_of_tiles(
    in_size: int, slices: tuple[int, ...], rank: int, tile_rows: int, shrinking: dict[str, int], device: torch.device
) -> None:
    adapters = mixes(37)["mixed"]
    case = Case(37, in_size, slices, rank, device=device)
    with (
        overriding("lora_shrink", shrinking),
        overriding("lora_expand", {"block_n": 32, "block_r": 32, "num_warps": 4}),
    ):
        got = case.run(plan_of(adapters, 5, device, tile_rows))
    assert (got.double() - case.expected(adapters)).abs().max() < 2e-3


@pytest.mark.parametrize("programs", [1, 2])
@pytest.mark.parametrize(("slices", "rank"), [((130, 7, 3), 16), ((64, 64), 16), ((200,), 16), ((130, 7), 32)])
@pytest.mark.parametrize("num_rows", [1, 37])
def test_many_tiles_a_program_change_no_bit(
    num_rows: int, slices: tuple[int, ...], rank: int, programs: int, device: torch.device
) -> None:
    """Where a rank is several blocks it has one tile, whatever the table says."""
    case = Case(num_rows, 80, slices, rank, dtype=torch.float16, device=device)
    plan = plan_of(mixes(num_rows)["mixed"] if num_rows > 1 else [2], 5, device)
    one_each = {"block_n": 16, "block_r": 16, "num_warps": 4}
    with overriding("lora_expand", one_each):
        expected = case.run(plan)
    with overriding("lora_expand", {**one_each, "programs": programs}):
        assert torch.equal(case.run(plan), expected)
    assert not torch.equal(expected, case.y)


@pytest.mark.parametrize(("num_tiles", "programs", "tiles"), [(224, 8, 28), (32, 8, 4), (3, 8, 1), (9, 8, 2)])
def test_an_item_has_at_most_so_many_programs(num_tiles: int, programs: int, tiles: int) -> None:
    found = lora_expand_module.tiles_of_program
    assert found(num_tiles, {"programs": programs}, True) == tiles
    assert found(num_tiles, {"programs": programs}, False) == found(num_tiles, {}, True) == 1


def test_steps_with_as_many_rows_an_item_launch_one_kernel(device: torch.device) -> None:
    """Whatever their number of tokens: one that has not been compiled before would be while it is waited for."""
    seen = set()
    for num_tokens in (257, 300, 512, 700, 1024):
        case = Case(num_tokens, 32, (600,), dtype=torch.float16, device=device)
        plan = plan_of([0] * num_tokens, 1, device, tile_rows=32)
        with recorded(lora_expand_module, "_lora_expand_kernel") as launches:
            case.run(plan)
        seen |= {tuple(sorted((name, value) for name, value in each.items() if name.isupper())) for each in launches}
    assert len(seen) == 1


@pytest.mark.parametrize("num_rows", [1, 19])
def test_kernel_and_twin_round_in_the_same_places(num_rows: int, device: torch.device) -> None:
    """With the parameters that are shipped."""
    adapters = mixes(num_rows)["mixed"] if num_rows > 1 else [3]
    case = Case(num_rows, 512, (256, 64, 64), dtype=torch.float16, device=device)
    plan = plan_of(adapters, 5, device)
    got, twin = case.run(plan).float(), case.run(plan, is_twin=True).float()
    off = (got - twin).abs()
    assert off.max() < 2**-8 * twin.abs().max()
    assert (off > 0).float().mean() < 0.05  # where a sum in another order falls to the other side of a half


def test_a_row_does_not_depend_on_the_rows_beside_it(device: torch.device) -> None:
    """Bit for bit, alone and among others, whatever the tile that holds it and the blocks that a launch sums."""
    adapters = [3, *mixes(39)["mixed"]]
    case = Case(40, 200, dtype=torch.float16, device=device)
    with overriding("lora_shrink", SMALL):
        alone = Case(40, 200, dtype=torch.float16, device=device)
        alone.x, alone.y = case.x[:1], case.y[:1]
        first = alone.run(plan_of([3], 5, device))[0]
    for tile_rows, shrinking in itertools.product((16, 32, 64), (SMALL, WHOLE)):
        with overriding("lora_shrink", shrinking):
            assert torch.equal(case.run(plan_of(adapters, 5, device, tile_rows))[0], first)


def test_splits_are_few_and_hold_the_input() -> None:
    for in_size in (1, 64, 65, 1024, 1025, 4096, 14336, 28672):
        size = lora_shrink_module.split_size_of(in_size)
        assert size >= 64
        assert size & (size - 1) == 0
        assert -(-in_size // size) <= 16


def test_strided_rows_and_twice_the_same(device: torch.device) -> None:
    adapters = mixes(18)["mixed"]
    case = Case(18, device=device)
    wide = torch.randn(18, 100, device=device)
    wide[:, :80] = case.x
    case.x = wide[:, :80]
    first, second = (case.run(plan_of(adapters, 5, device)) for _ in range(2))
    assert torch.equal(first, second)
    assert (first.double() - case.expected(adapters)).abs().max() < 1e-4
