"""Soft caps: numbers are kept between -cap and cap by `cap * tanh(x / cap)`.

Of attention's scores a cap is part of the attention kernels, which share a function here; of logits it is a pass of its
own, in place. Knows rows, no models.
"""

from __future__ import annotations

from torch import Tensor

from cb_backend.kernels.launch import (
    await_previous,
    can_overlap,
    dependent_options,
    jit,
    launch_parameters,
    let_next_start,
    needs_twin,
    tl,
)

LOG2E = 1.4426950408889634


@jit()
def capped(scores, SOFTCAP_LOG2E: tl.constexpr):
    """cap * tanh(x / cap) * log2(e), of `scores` that are 2 * log2(e) * x / cap (`score_scale`)."""
    return SOFTCAP_LOG2E * (1.0 - 2.0 / (tl.exp2(scores) + 1.0))


def score_scale(scale: float, softcap: float) -> float:
    """What attention kernels multiply q's products with keys by: softmax is taken in powers of two."""
    return scale * LOG2E * (2.0 / softcap if softcap else 1.0)


@jit()
def _cap_logits_kernel(logits_ptr, row_stride, vocab_size, cap, IS_DEPENDENT: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK columns of one row a program."""
    let_next_start(IS_DEPENDENT)
    await_previous(IS_DEPENDENT)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    logit_ptr = logits_ptr + tl.program_id(0).to(tl.int64) * row_stride + column
    x = tl.load(logit_ptr, mask=column < vocab_size, other=0.0)
    x32 = cap * (1.0 - 2.0 / (tl.exp2(x.to(tl.float32) * (2.0 * 1.4426950408889634) / cap) + 1.0))
    tl.store(logit_ptr, x32.to(x.dtype), mask=column < vocab_size)


def cap_logits(logits: Tensor, cap: float) -> Tensor:
    """`cap_logits_torch` in one launch; rows may be strided."""
    if needs_twin(logits):
        return cap_logits_torch(logits, cap)
    num_rows, vocab_size = logits.shape
    if num_rows == 0:
        return logits
    parameters = launch_parameters("cap_logits", logits.device)
    _cap_logits_kernel[(num_rows, -(-vocab_size // parameters["block"]))](
        logits, logits.stride(0), vocab_size, cap,
        IS_DEPENDENT=can_overlap(logits.device), BLOCK=parameters["block"],
        num_warps=parameters["num_warps"], **dependent_options(logits.device, num_rows),
    )  # fmt: skip
    return logits


def cap_logits_torch(logits: Tensor, cap: float) -> Tensor:
    """logits [num_rows, vocab_size] of any float type become `cap * tanh(logits / cap)`, in place; returns them."""
    return logits.copy_((logits.float() / cap).tanh_() * cap)
