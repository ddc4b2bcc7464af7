"""On a GPU, with the launch parameters that are shipped: a token has the same bits in steps of any size.

Items have more rows in larger steps, and the compiler takes other instructions of the tensor cores for them.
"""

from __future__ import annotations

import pytest
import torch

from cb_backend.kernels.lora_gated import lora_expand_gated
from cb_backend.kernels.lora_plan import AdapterPlan, plan_adapters
from cb_backend.kernels.lora_shrink import lora_shrink
from tests.kernels.test_lora import Case

MAX_ADAPTERS = 4
SIZES = (8, 40, 100, 200, 400, 1000, 2048)  # tokens of a step; of more tokens items have more rows
FIRST_TOKENS = slice(0, SIZES[0])
# Input size and slices of a model's products: q, k and v; o; gate and up; down.
PRODUCTS = {
    "qkv 8b": (4096, (4096, 1024, 1024)),
    "o 8b": (4096, (4096,)),
    "gate and up 8b": (4096, (14336, 14336)),
    "down 8b": (14336, (4096,)),
    "qkv 1b": (2048, (2048, 512, 512)),
    "down 1b": (8192, (2048,)),
}

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def plan_of(adapters: list[int], device: torch.device) -> AdapterPlan:
    """Of decode rows, with as many an item as the tables say."""
    slots = torch.arange(len(adapters), dtype=torch.int32, device=device)
    table = torch.tensor(adapters, dtype=torch.int32, device=device)
    nothing = torch.zeros(0, dtype=torch.int32, device=device)
    return plan_adapters(slots, len(adapters), nothing, nothing, 0, table, MAX_ADAPTERS)


@pytest.mark.parametrize("rank", [16, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("product", PRODUCTS)
def test_a_token_has_the_same_bits_in_steps_of_any_size(
    product: str, dtype: torch.dtype, rank: int, device: torch.device
) -> None:
    in_size, slices = PRODUCTS[product]
    case = Case(max(SIZES), in_size, slices, rank, MAX_ADAPTERS, dtype, device)
    case.a /= in_size**0.5  # in place: A and B are parts of one slab
    x, y = case.x, case.y
    is_adapted = torch.arange(SIZES[0], device=device) % (MAX_ADAPTERS + 1) > 0
    tile_rows, shrunk_bits, bits = set(), [], []
    for num_tokens in SIZES:
        plan = plan_of([token % (MAX_ADAPTERS + 1) - 1 for token in range(num_tokens)], device)
        tile_rows.add(plan.tile_rows)
        case.x, case.y = x[:num_tokens], y[:num_tokens]
        shrunk = lora_shrink(case.x, case.a, plan)
        places = plan.rows.long().argsort()[FIRST_TOKENS]  # of tokens in the list
        shrunk_bits.append(shrunk[:, places[is_adapted]].clone())
        bits.append(case.run(plan)[FIRST_TOKENS])
        if len(slices) == 2:
            activated = lora_expand_gated(case.y, shrunk, case.b, case.scales, slices, plan)
            bits[-1] = torch.cat((bits[-1], activated[FIRST_TOKENS]), dim=1)
    assert len(tile_rows) > 1, "nothing was compared"
    wrong = {
        what: [size for size, each in zip(SIZES, found, strict=True) if not torch.equal(each, found[0])]
        for what, found in (("shrunk", shrunk_bits), ("added", bits))
    }
    assert wrong == {"shrunk": [], "added": []}, f"steps in which they differ from those of {SIZES[0]} tokens"
