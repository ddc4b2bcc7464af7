"""The gated activation of an MLP: `silu(gate) * up`, gate and up side by side in one row.

Knows rows, not the projections before and after it.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def silu_mul_torch(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    """gate_up [num_tokens, 2 * intermediate_size], gate first. Returns [num_tokens, intermediate_size].

    silu is taken in fp32 and rounded to the input's type before the product, as in a framework's two-step version.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    product = functional.silu(gate) * up
    return product if out is None else out.copy_(product)
