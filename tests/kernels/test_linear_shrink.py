"""A product and what adapters shrink beside it: the bits of the two launches one after the other, and their order."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor

from cb_backend.kernels import launch, linear_shrink, lora_shrink
from cb_backend.kernels.launch import overriding
from cb_backend.kernels.linear import linear
from cb_backend.kernels.lora_expand import lora_expand
from cb_backend.kernels.lora_plan import AdapterPlan
from cb_backend.kernels.rms_norm import rms_norm
from tests.kernels.compile_cases import case
from tests.kernels.test_lora import Case, mixes, plan_of

TILED = {"block_n": 32, "block_k": 32, "splits": 2, "num_warps": 4, "num_stages": 2}
VECTOR = {"vector": 1, "block_n": 8, "block_k": 64, "num_warps": 4}
LIBRARY = {"library": 1}
WHOLE_SPLIT = {"block_k": 512, "block_r": 16, "num_warps": 4, "num_stages": 1}
IN_BLOCKS = {**WHOLE_SPLIT, "block_k": 64, "num_stages": 3}
NARROW = {"block_k": 32, "block_r": 16, "num_warps": 8, "num_stages": 3}  # of more threads than 16 bytes for each
MAX_ADAPTERS = 5


def both(
    case: Case, weight: Tensor, bias: Tensor | None, out: Tensor | None, plan: AdapterPlan
) -> tuple[Tensor, Tensor]:
    return linear_shrink.linear_shrink(case.x, weight, bias, out, case.a, plan)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("num_rows", "parameters"), [
    (1, VECTOR), (1, TILED), (7, TILED), (40, TILED), (3, LIBRARY), (150, TILED),
])  # fmt: skip
def test_bits_are_those_of_two_launches(
    num_rows: int, parameters: dict[str, int], has_bias: bool, device: torch.device
) -> None:
    case = Case(num_rows, 128, dtype=torch.float16, device=device)
    weight, bias = case.b[0].repeat(1, 8).contiguous(), case.y[0].clone() if has_bias else None
    plan = plan_of(mixes(num_rows)["mixed"], MAX_ADAPTERS, device)
    with overriding("linear", parameters):
        product, shrunk = both(case, weight, bias, None, plan)
        assert torch.equal(product, linear(case.x, weight, bias))
        into = torch.empty_like(product)
        assert both(case, weight, None, into, plan)[0] is into
        assert torch.equal(into, linear(case.x, weight))
    expected = lora_shrink.lora_shrink(case.x, case.a, plan)
    where = torch.cat([torch.arange(of_item.start, of_item.stop) for _, of_item in plan.by_item()] or [torch.zeros(0)])
    assert torch.equal(shrunk[:, where.long()], expected[:, where.long()])


def test_nothing_runs_beside_a_librarys_product(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels may let the next one start before they have waited themselves."""
    launched: list[bool] = []
    original = lora_shrink.launch_shrink

    def noticing(*given: Any, is_beside: bool = False) -> None:
        launched.append(is_beside)
        original(*given, is_beside=is_beside)

    monkeypatch.setattr(lora_shrink, "launch_shrink", noticing)
    monkeypatch.setattr(linear_shrink, "launch_shrink", noticing)
    case = Case(3, 128, dtype=torch.float16, device=device)
    weight, plan = case.b[0].repeat(1, 8).contiguous(), plan_of([0, 1, 2], MAX_ADAPTERS, device)
    for parameters in (LIBRARY, TILED):
        with overriding("linear", parameters):
            both(case, weight, None, None, plan)
    assert launched == [False, True]


def test_what_is_shrunk_has_memory_before_the_product_has_its_own(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The product gives back the memory of its sums when it is launched, and needs it until it has run."""
    order: list[str] = []
    for module, name in ((linear_shrink, "new_shrunk"), (linear_shrink, "launched_linear")):
        original = getattr(module, name)
        monkeypatch.setattr(
            module,
            name,
            lambda *given, name=name, original=original, **more: (order.append(name), original(*given, **more))[1],
        )
    case = Case(4, 128, dtype=torch.float16, device=device)
    with overriding("linear", TILED):
        both(case, case.b[0].repeat(1, 8).contiguous(), None, None, plan_of([0, 1, -1, 2], MAX_ADAPTERS, device))
    assert order == ["new_shrunk", "launched_linear"]


# ---- what is launched -----------------------------------------------------------------------------------------------
def shared(kernel: str, num_rows: int, parameters: dict[str, int], shrink: Any = None) -> dict[str, Any]:
    return case("linear_shrink", kernel, 90, {"tile_rows": 16, "num_rows": num_rows, "parameters": parameters,
                                              "shrink": shrink})  # fmt: skip


PRODUCTS = {
    "one row": shared("_one_row_kernel", 1, {**VECTOR, "fold": 8}),
    "tiled": shared("_linear_kernel", 8, TILED),
    "tiled, prefetching": shared("_linear_kernel", 64, {**TILED, "prefetch": 128}),
}
SHRINKS = {
    "whole": shared("_lora_shrink_kernel", 8, TILED, WHOLE_SPLIT),
    "blocks": shared("_lora_shrink_kernel", 8, TILED, IN_BLOCKS),
}


def shipped() -> dict[str, dict[str, int]]:
    """Launch parameters of items of 16 rows in 16 bits, by name: what runs beside products."""
    found: dict[str, dict[str, int]] = {}
    for path in sorted(launch.TUNED.glob("*.json")):
        for number, entry in enumerate(json.loads(path.read_text()).get("lora_shrink", [])):
            when = entry.get("when", {})
            if when.get("m", 16) == 16 and when.get("bytes", 2) == 2:
                found[f"{path.stem} {number}"] = entry["use"]
    return found


SHIPPED = {name: shared("_lora_shrink_kernel", 8, TILED, use) for name, use in shipped().items()}
CASES = {
    **PRODUCTS,
    **SHRINKS,
    **SHIPPED,
    "narrow": shared("_lora_shrink_kernel", 8, TILED, NARROW),
    "after": shared("_lora_shrink_kernel", 200, TILED, WHOLE_SPLIT),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_lets_the_next_start_once_its_input_is_complete(
    name: str, compiled: dict[str, dict[str, Any]]
) -> None:
    assert compiled[name]["lets_next_start_after_wait"]
    assert not compiled[name]["lets_next_start_before_wait"], "the next one would read what is not there yet"
    assert compiled[name]["stores_before_wait"] == 0


@pytest.mark.parametrize("name", SHRINKS)
def test_beside_it_nothing_waits_before_its_work_is_done(name: str, compiled: dict[str, dict[str, Any]]) -> None:
    """What waits for this kernel has to have waited for the product too; its input does not come through L1."""
    report = compiled[name]
    assert report["waits"]
    assert report["stores_before_wait"] > 0
    assert report["stores_after_wait"] == 0
    assert not report["lets_next_start_after_wait"]
    assert report["loads_past_l1"] > 0


@pytest.mark.parametrize("name", SHIPPED)
def test_no_input_comes_through_l1_with_the_parameters_that_are_shipped(
    name: str, compiled: dict[str, dict[str, Any]]
) -> None:
    """Copies of less than 16 bytes a thread do, whatever they are told: nothing has told this L1 what is new."""
    assert compiled[name]["copies_through_l1"] == 0
    assert compiled[name]["loads_past_l1"] > 0


def test_copies_that_would_come_through_l1_are_seen(compiled: dict[str, dict[str, Any]]) -> None:
    assert compiled["narrow"]["copies_through_l1"] > 0


def test_above_the_rows_of_dependent_launches_it_waits_first(compiled: dict[str, dict[str, Any]]) -> None:
    assert compiled["after"]["stores_before_wait"] == 0


# ---- on a GPU -------------------------------------------------------------------------------------------------------
@pytest.fixture
def _read_again() -> Iterator[None]:
    """Whether launches are dependent is read once a process."""
    yield
    launch.can_overlap.cache_clear()
    launch.dependent_options.cache_clear()


@pytest.mark.gpu
@pytest.mark.usefixtures("_read_again")
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="needs dependent launches"
)
@pytest.mark.parametrize(("num_rows", "parameters", "shrink"), [
    (1, {**VECTOR, "block_k": 512, "fold": 8}, IN_BLOCKS), (8, {**TILED, "splits": 4}, WHOLE_SPLIT),
    (32, {**TILED, "block_k": 128}, IN_BLOCKS), (64, TILED, IN_BLOCKS),
    (33, LIBRARY, IN_BLOCKS), (128, LIBRARY, WHOLE_SPLIT), (128, {"library": 2}, IN_BLOCKS),
])  # fmt: skip
def test_a_long_chain_has_the_bits_of_plain_launches(
    num_rows: int, parameters: dict[str, int], shrink: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each input is what the chain has just written, in memory that it uses again: whoever reads too early sees it."""
    device, size = torch.device("cuda", 0), 2048
    case = Case(num_rows, size, (size,), 16, MAX_ADAPTERS, torch.bfloat16, device)
    weight = torch.randn(size, size, device=device).bfloat16() / size**0.5
    case.a /= size
    plan = plan_of([row % (MAX_ADAPTERS + 1) - 1 for row in range(num_rows)], MAX_ADAPTERS, device)
    norm_weight = torch.ones(size, device=device).bfloat16()

    def chain() -> Tensor:
        y, seen = case.y, []
        for _ in range(60):
            x = rms_norm(y, norm_weight, 1e-6)
            y, shrunk = linear_shrink.linear_shrink(x, weight, None, None, case.a, plan)
            lora_expand(y, shrunk, case.b, case.scales, case.slices, plan)
            seen.append(y[:, :8])
            del x, shrunk
        return torch.stack([each.clone() for each in seen])

    found = []
    for switch in ("0", "1"):
        monkeypatch.setenv("CB_BACKEND_DEPENDENT_LAUNCHES", switch)
        launch.can_overlap.cache_clear()
        launch.dependent_options.cache_clear()
        with ExitStack() as stack, torch.inference_mode():
            stack.enter_context(overriding("linear", parameters))
            stack.enter_context(overriding("lora_shrink", shrink))
            chain()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = chain()
        for _ in range(20):
            graph.replay()
            torch.cuda.synchronize()
            found.append(out.clone())
    assert found[0].isfinite().all()
    assert len({tuple(each[:, 0, 0].tolist()) for each in found}) == 1
    assert all(torch.equal(each, found[0]) for each in found)
