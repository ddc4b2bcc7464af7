"""Expand and activation in one launch: bit for bit the two launches, whatever the mix, and what the twin says."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cb_backend.kernels import lora_gated
from cb_backend.kernels.launch import IS_INTERPRETING, launch_parameters, overriding
from cb_backend.kernels.lora_expand import lora_expand
from cb_backend.kernels.lora_gated import lora_expand_gated, lora_expand_gated_torch
from cb_backend.kernels.lora_plan import AdapterPlan
from cb_backend.kernels.lora_shrink import lora_shrink
from cb_backend.kernels.silu_mul import gelu_mul, silu_mul
from tests.kernels.test_lora import Case, mixes, plan_of

pytestmark = pytest.mark.usefixtures("rows_add_up_alike")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 5e-2}
SMALL = {"block_n": 32, "block_r": 16, "num_warps": 4}
MAX_ADAPTERS = 5
OF_TABLE = {  # by rows of an item: what serves shapes that nobody has tuned
    m: [launch_parameters(op, torch.device("cpu"), n=300, m=m, bytes=2) for op in ("lora_expand", "lora_expand_gated")]
    for m in (16, 64)
}


@pytest.fixture(autouse=True)
def _small_blocks() -> Iterator[None]:
    with overriding("lora_expand", SMALL), overriding("lora_expand_gated", SMALL):
        yield


@pytest.fixture(autouse=True)
def _products_of_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted, they are of the numbers, where the interpreter would multiply their bits as integers."""
    if not IS_INTERPRETING:
        return
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    original = InterpreterBuilder.create_dot

    def widened(operand: Any) -> Any:
        if operand.dtype.scalar != tl.bfloat16:
            return operand
        return TensorHandle((operand.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *more: Any) -> Any:
        return original(self, widened(a), widened(b), *more)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


def in_two_launches(case: Case, shrunk: Tensor, plan: AdapterPlan, is_gelu: bool) -> Tensor:
    y = case.y.clone()
    lora_expand(y, shrunk, case.b, case.scales, case.slices, plan)
    return gelu_mul(y) if is_gelu else silu_mul(y)


def check(case: Case, plan: AdapterPlan, is_gelu: bool = False, parameters: dict[str, int] = SMALL) -> Tensor:
    """Every bit, and nearly the twin's; gate and up stay as they were."""
    shrunk, before = lora_shrink(case.x, case.a, plan), case.y.clone()
    arguments = (case.y, shrunk, case.b, case.scales, case.slices, plan, is_gelu)
    with overriding("lora_expand_gated", parameters):
        found = lora_expand_gated(*arguments)
    assert torch.equal(found, in_two_launches(case, shrunk, plan, is_gelu))
    tolerance = TOLERANCE[found.dtype]
    twin = lora_expand_gated_torch(*arguments)
    torch.testing.assert_close(found.float(), twin.float(), atol=tolerance, rtol=tolerance)
    assert torch.equal(case.y, before)
    return found


def case_of(num_rows: int, slices: tuple[int, ...], rank: int, dtype: torch.dtype, device: torch.device) -> Case:
    """With sums of the size of what they are added to."""
    case = Case(num_rows, 80, slices, rank, MAX_ADAPTERS, dtype, device)
    case.a /= 40
    return case


@pytest.mark.parametrize("mix", mixes(1))
@pytest.mark.parametrize("num_rows", [1, 2, 16, 17, 33, 40])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_are_those_of_two_launches(num_rows: int, mix: str, dtype: torch.dtype, device: torch.device) -> None:
    case = case_of(num_rows, (48, 48), 16, dtype, device)
    check(case, plan_of(mixes(num_rows)[mix], MAX_ADAPTERS, device))


@pytest.mark.parametrize("num_rows", range(1, 41))
def test_any_number_of_rows_and_any_mix(num_rows: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    adapters = torch.randint(-2, MAX_ADAPTERS + 2, (num_rows,), generator=generator).tolist()  # some do not exist
    check(case_of(num_rows, (40, 40), 16, torch.float16, device), plan_of(adapters, MAX_ADAPTERS, device))


@pytest.mark.parametrize("is_gelu", [False, True], ids=["silu", "gelu"])
@pytest.mark.parametrize("slices", [(50, 50), (100,), (1, 1), (33, 33)], ids=str)
@pytest.mark.parametrize("rank", [16, 32, 48])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sizes_ranks_and_layouts(
    dtype: torch.dtype, rank: int, slices: tuple[int, ...], is_gelu: bool, device: torch.device
) -> None:
    """One slice: gate and up are stored as one, with one A and one scale."""
    adapters = mixes(23)["mixed"]
    check(case_of(23, slices, rank, dtype, device), plan_of(adapters, MAX_ADAPTERS, device), is_gelu)


@pytest.mark.parametrize("tile_rows", [16, 32, 64])
@pytest.mark.parametrize("block_n", [16, 32, 128])
@pytest.mark.parametrize("block_r", [16, 32])
def test_launch_parameters_change_no_bit(block_r: int, block_n: int, tile_rows: int, device: torch.device) -> None:
    """Of ranks that are summed in one block: in several the sums are rounded in between."""
    case = case_of(70, (72, 72), block_r, torch.float32, device)
    parameters = {"block_n": block_n, "block_r": block_r, "num_warps": 4}
    with overriding("lora_expand", {**SMALL, "block_r": block_r}):
        check(case, plan_of(mixes(70)["mixed"], MAX_ADAPTERS, device, tile_rows), parameters=parameters)


@pytest.mark.parametrize("num_rows", [3, 70])
@pytest.mark.parametrize("size", [16, 72, 200])
@pytest.mark.parametrize("programs", [1, 2])
def test_many_tiles_a_program_change_no_bit(programs: int, size: int, num_rows: int, device: torch.device) -> None:
    case = case_of(num_rows, (size, size), 16, torch.float16, device)
    plan = plan_of(mixes(num_rows)["mixed"], MAX_ADAPTERS, device)
    with overriding("lora_expand", {**SMALL, "block_n": 16}):
        check(case, plan, parameters={**SMALL, "block_n": 16, "programs": programs})


def test_a_row_does_not_depend_on_the_rows_beside_it(device: torch.device) -> None:
    """Nor does a row without an adapter on whether others have one."""
    adapters = [3, -1, *mixes(38)["mixed"]]
    case = case_of(40, (48, 48), 16, torch.float16, device)
    among_others = check(case, plan_of(adapters, MAX_ADAPTERS, device))
    for row in (0, 1):
        alone = case_of(40, (48, 48), 16, torch.float16, device)
        alone.x, alone.y = case.x[row : row + 1], case.y[row : row + 1]
        assert torch.equal(check(alone, plan_of([adapters[row]], MAX_ADAPTERS, device))[0], among_others[row])
    assert torch.equal(among_others[1], silu_mul(case.y)[1])


def test_rows_of_gate_and_up_may_be_strided(device: torch.device) -> None:
    case = case_of(18, (48, 48), 16, torch.float16, device)
    plan, whole = plan_of(mixes(18)["mixed"], MAX_ADAPTERS, device), case.y
    first = check(case, plan)
    wide = torch.zeros(18, 100, dtype=torch.float16, device=device)
    wide[:, :96] = whole
    case.y = wide[:, :96]
    assert torch.equal(check(case, plan), first)


def test_the_grid_follows_from_the_shape_alone(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """As does what is compiled, so that a captured graph serves any mix."""
    launches: list[tuple[tuple[int, ...], tuple[int, ...], tuple[tuple[str, object], ...]]] = []

    class Recorder:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def launch(*arguments: Any, **constants: object) -> None:
                numbers = tuple(each for each in arguments if isinstance(each, int))  # the others are tensors
                launches.append((grid, numbers, tuple(sorted(constants.items()))))

            return launch

    monkeypatch.setattr(lora_gated, "_lora_expand_gated_kernel", Recorder())
    case = case_of(33, (48, 48), 16, torch.float16, device)
    for adapters in mixes(33).values():
        plan = plan_of(adapters, MAX_ADAPTERS, device)
        assert int(plan.counts[1]) <= plan.bound_of_all
        lora_expand_gated(case.y, lora_shrink(case.x, case.a, plan), case.b, case.scales, case.slices, plan)
    assert len(set(launches)) == 1
    assert launches[0][0] == (MAX_ADAPTERS + 1 + 33 // 16, 2)


def test_gate_and_up_are_of_one_size(device: torch.device) -> None:
    case = case_of(2, (40, 56), 16, torch.float32, device)
    plan = plan_of([0, 1], MAX_ADAPTERS, device)
    with pytest.raises(AssertionError, match="of one size"):
        lora_expand_gated(case.y, lora_shrink(case.x, case.a, plan), case.b, case.scales, case.slices, plan)


def test_the_twin_adds_up_in_float64_what_it_says(device: torch.device) -> None:
    """By arithmetic of its own: gate and up of each row, then the activation."""
    for slices, is_gelu in itertools.product(((24, 24), (48,)), (False, True)):
        adapters = mixes(19)["mixed"]
        case = case_of(19, slices, 16, torch.float32, device)
        plan = plan_of(adapters, MAX_ADAPTERS, device)
        gate, up = case.expected(adapters).chunk(2, dim=1)
        activated = torch.nn.functional.gelu(gate, approximate="tanh") if is_gelu else torch.nn.functional.silu(gate)
        shrunk = lora_shrink(case.x, case.a, plan)
        found = lora_expand_gated_torch(case.y, shrunk, case.b, case.scales, slices, plan, is_gelu)
        torch.testing.assert_close(found.double(), activated * up, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("max_adapters", [1, 32])
@pytest.mark.parametrize("tile_rows", [16, 64])
def test_launch_parameters_of_the_table(tile_rows: int, max_adapters: int, device: torch.device) -> None:
    """Those that serve, of fewer and of more adapters."""
    generator = torch.Generator().manual_seed(tile_rows)
    adapters = torch.randint(-1, max_adapters, (90,), generator=generator).tolist()
    case = Case(90, 80, (300, 300), 16, max_adapters, torch.float16, device)
    case.a /= 40
    expand, gated = OF_TABLE[tile_rows]
    with overriding("lora_expand", expand):
        check(case, plan_of(adapters, max_adapters, device, tile_rows), parameters=gated)


def test_no_rows(device: torch.device) -> None:
    case = case_of(1, (48, 48), 16, torch.float16, device)
    plan = plan_of([0], MAX_ADAPTERS, device)
    shrunk = lora_shrink(case.x, case.a, plan)
    plan = plan._replace(rows=plan.rows[:0])
    found = lora_expand_gated(case.y[:0], shrunk[:, :0], case.b, case.scales, case.slices, plan)
    assert found.shape == (0, 48)
