"""The work list of adapters: every token once, items of one adapter or of none, the order kept, whatever the mix."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cb_backend.engine.runner.cuda_warm_up import rehearsed_shapes
from cb_backend.kernels import lora_plan
from cb_backend.kernels.launch import overriding
from cb_backend.kernels.lora_plan import AdapterPlan, max_items, plan_adapters, plan_adapters_torch

NUM_SLOTS = 48
PADDING = NUM_SLOTS


def check(plan: AdapterPlan, token_adapters: list[int], max_adapters: int) -> None:
    """Holds a plan to what its docstring says."""
    num_items, num_all_items = plan.counts.tolist()
    num_tokens, tile_rows = len(token_adapters), plan.tile_rows
    assert num_items <= plan.bound == max_items(num_tokens, max_adapters, tile_rows)
    assert num_items <= num_all_items <= plan.bound_of_all == max_items(num_tokens, max_adapters + 1, tile_rows)
    found: dict[int, list[int]] = {}
    end = 0
    items = plan.items[:num_all_items].tolist()
    for index, (adapter, first, count, _) in enumerate(items):
        assert (adapter < 0) == (index >= num_items), "those without an adapter are behind the others"
        assert first == end, "items follow each other"
        end = first + count
        is_last = index + 1 == num_all_items or items[index + 1][0] != adapter
        assert 0 < count <= tile_rows if is_last else count == tile_rows
        found.setdefault(adapter, []).extend(plan.rows[first:end].tolist())
    assert list(plan.by_item()) == [
        (adapter, slice(first, first + count)) for adapter, first, count, _ in items[:num_items]
    ]
    assert end == num_tokens
    assert list(found) == sorted(found, key=lambda adapter: (adapter < 0, adapter))
    wanted = {a: [t for t, each in enumerate(token_adapters) if each == a] for a in range(-1, max_adapters)}
    assert found == {a: tokens for a, tokens in wanted.items() if tokens}


def make_case(
    num_decode: int, lengths: list[int], adapter_of_slot: list[int], padding: int = 0, empty_prompts: int = 0
) -> tuple[tuple[Tensor, int, Tensor, Tensor, int, Tensor], list[int]]:
    """(arguments of the plan, the tokens' adapters): slots in a shuffled order, prompts after the decode rows."""
    order = torch.randperm(NUM_SLOTS, generator=torch.Generator().manual_seed(num_decode + 7 * len(lengths))).tolist()
    slots, prompts = order[:num_decode], order[num_decode : num_decode + len(lengths)]
    ends = torch.tensor([0, *lengths]).cumsum(0).tolist()
    starts = torch.tensor(ends + [ends[-1]] * empty_prompts, dtype=torch.int32)
    tables = torch.tensor([*adapter_of_slot, -1], dtype=torch.int32)
    prompt_slots = torch.tensor(prompts + [PADDING] * empty_prompts, dtype=torch.int32)
    row_slots = torch.tensor([*slots, *prompts, *[PADDING] * empty_prompts], dtype=torch.int32)
    tokens = [adapter_of_slot[slot] for slot in slots]
    for slot, length in zip(prompts, lengths, strict=True):
        tokens += [adapter_of_slot[slot]] * length
    arguments = (row_slots, num_decode, prompt_slots, starts, ends[-1] + padding, tables)
    return arguments, tokens + [-1] * padding


def mixes(max_adapters: int) -> dict[str, list[int]]:
    generator = torch.Generator().manual_seed(max_adapters)
    mixed = torch.randint(-1, max_adapters, (NUM_SLOTS,), generator=generator).tolist()
    beyond_the_last = [max_adapters + 3 if index % 2 else 0 for index in range(NUM_SLOTS)]
    one_for_all = [max_adapters - 1] * NUM_SLOTS
    return {"mixed": mixed, "none": [-1] * NUM_SLOTS, "one for all": one_for_all, "beyond the last": beyond_the_last}


@pytest.mark.parametrize("max_adapters", [1, 2, 5, 32])
@pytest.mark.parametrize(("num_decode", "lengths", "padding", "empty_prompts"), [
    (1, [], 0, 0), (16, [], 0, 0), (17, [], 0, 0), (40, [], 0, 0),
    (0, [1], 0, 0), (0, [40, 3, 1, 17], 0, 0), (3, [5, 9], 2, 2), (9, [33, 16, 1], 13, 5), (0, [70, 300], 0, 6),
])  # fmt: skip
@pytest.mark.parametrize("tile_rows", [16, 32])
def test_kernel_and_twin_list_every_token_once(
    tile_rows: int, num_decode: int, lengths: list[int], padding: int, empty_prompts: int, max_adapters: int,
    device: torch.device,
) -> None:  # fmt: skip
    for adapter_of_slot in mixes(max_adapters).values():
        arguments, tokens = make_case(num_decode, lengths, adapter_of_slot, padding, empty_prompts)
        wanted = [adapter if adapter < max_adapters else -1 for adapter in tokens]
        on_device = [each.to(device) if isinstance(each, Tensor) else each for each in arguments]
        with overriding("lora_plan", {"tile_rows": tile_rows}):
            plan = plan_adapters(*on_device, max_adapters)  # type: ignore[arg-type]
        assert plan.tile_rows == tile_rows
        check(plan, wanted, max_adapters)
        check(plan_adapters_torch(*arguments, max_adapters), wanted, max_adapters)


def test_the_same_slots_give_the_same_list(device: torch.device) -> None:
    arguments, _ = make_case(9, [33, 16, 1], mixes(5)["mixed"], 13, 5)
    on_device = [each.to(device) if isinstance(each, Tensor) else each for each in arguments]
    first, second = (plan_adapters(*on_device, 5) for _ in range(2))  # type: ignore[arg-type]
    assert torch.equal(first.counts, second.counts)
    used = int(first.counts[1])
    assert torch.equal(first.items[:used], second.items[:used])
    assert torch.equal(first.rows, second.rows)


def test_the_bound_holds_for_every_number_of_tokens() -> None:
    """The worst mix: as many adapters as can be with a token each, the rest full items of one of them."""
    for num_tokens in range(1, 200):
        for max_adapters in (1, 3, 8, 32):
            for used in range(1, min(num_tokens, max_adapters) + 1):
                needed = (used - 1) + -(-(num_tokens - used + 1) // 16)
                assert needed <= max_items(num_tokens, max_adapters, 16)


class Recorder:
    """In place of the kernel: what is compiled for its launches."""

    def __init__(self) -> None:
        self.variants: set[tuple[tuple[str, int], ...]] = set()

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*_: object, **constants: int) -> None:
            self.variants.add(tuple(sorted(constants.items())))

        return launch


@pytest.mark.parametrize(("max_num_seqs", "budget"), [(4, 64), (48, 300), (256, 1500), (256, 2048), (512, 8192)])
def test_nothing_is_compiled_while_serving(max_num_seqs: int, budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the tokens and the prompts of a step, the start has rehearsed what its plan launches."""
    kernel = Recorder()
    monkeypatch.setattr(lora_plan, "_plan_adapters_kernel", kernel)
    ints = torch.zeros(budget + max_num_seqs + 1, dtype=torch.int32)

    def launch(num_decode: int, num_prefill: int, num_prompts: int) -> None:
        plan_adapters(ints, num_decode, ints[:num_prompts], ints[: num_prompts + 1], num_prefill, ints, 8)

    for shape in rehearsed_shapes(max_num_seqs, budget, has_adapters=True):
        if shape.has_adapters:
            launch(shape.num_decode, shape.num_prefill, shape.num_prompts)
    rehearsed = set(kernel.variants)
    for num_tokens in range(1, budget + 1, 1 if budget < 400 else 37):
        for num_prompts in {0, 1, 2, 3, 4, 8, 17, min(num_tokens, max_num_seqs)}:
            for num_prefill in {num_tokens, min(num_tokens, max(1, num_prompts))} if num_prompts else {0}:
                num_decode = num_tokens - num_prefill
                if num_decode + num_prompts <= max_num_seqs and num_prompts <= num_prefill + (not num_prompts):
                    launch(num_decode, num_prefill, num_prompts)
    assert kernel.variants == rehearsed
