"""Eight-bit floats (e4m3: 4 bits of exponent, 3 of mantissa): what the kernels and twins that use them share.

Knows numbers, not what is stored in them.
"""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0  # the largest finite one; there is no infinity
MIN_CAPABILITY = (8, 9)  # of a GPU whose Triton kernels can convert them


def to_fp8(x: Tensor) -> Tensor:
    """The nearest e4m3 number, ties to even; what is beyond the largest becomes the largest. NaN stays NaN."""
    return x.clamp(-FP8_MAX, FP8_MAX).to(FP8)


def is_fp8_capable(device: torch.device) -> bool:
    """Whether kernels with fp8 elements can run: on a CPU (the twins, the interpreter) and from Ada and Hopper on."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= MIN_CAPABILITY


def capability_name(device: torch.device) -> str:
    """The card's name and compute capability, for messages."""
    capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
    return f"{torch.cuda.get_device_name(device)} ({capability})"
