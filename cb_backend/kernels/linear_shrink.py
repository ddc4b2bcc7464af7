"""A product and the same input shrunk by adapters, side by side: the second launch does not wait for the first.

In a chain of dependent launches (`launch.can_overlap`) every kernel waits for the one before it, and what adapters
shrink would wait for a product it has nothing to do with. So the product lets it start once their input is complete,
instead of at once, and it waits for the product when its own work is done: what waits for it has waited for both.
"""

from __future__ import annotations

from torch import Tensor

from cb_backend.kernels.launch import MAX_DEPENDENT_ROWS, needs_twin
from cb_backend.kernels.linear import launched_linear, linear, linear_torch, product_parameters
from cb_backend.kernels.lora_plan import AdapterPlan
from cb_backend.kernels.lora_shrink import launch_shrink, lora_shrink, lora_shrink_torch, new_shrunk


def linear_shrink(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None, a: Tensor, plan: AdapterPlan
) -> tuple[Tensor, Tensor]:
    """`linear_shrink_torch` in two launches that overlap; rows of x may be strided."""
    if needs_twin(x):
        return linear_shrink_torch(x, weight, bias, out, a, plan)
    parameters = product_parameters("linear", x, weight, weight.shape[0])
    if x.shape[0] > MAX_DEPENDENT_ROWS or "library" in parameters:
        # A library does not say when its kernels let the next one start. So one after the other, and in this order: a
        # product of ours may fetch its weights meanwhile.
        shrunk = lora_shrink(x, a, plan)
        return linear(x, weight, bias, out), shrunk
    shrunk = new_shrunk(x, a)  # before the product's own buffers, which would be free for it while they are in use
    product = launched_linear(x, weight, bias, out, parameters, is_shared=True)
    launch_shrink(x, a, plan, shrunk, is_beside=True)
    return product, shrunk


def linear_shrink_torch(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None, a: Tensor, plan: AdapterPlan
) -> tuple[Tensor, Tensor]:
    """(x W^T + b, what `lora_shrink_torch` makes of x); arguments as of `linear_torch` and of that."""
    return linear_torch(x, weight, bias, out), lora_shrink_torch(x, a, plan)
