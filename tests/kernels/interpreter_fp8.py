"""Conversions from and to fp8 as the hardware makes them, for Triton's interpreter.

Triton 3.6's own drop the carry of a rounding (126 becomes 64), flush small numbers and make 384 of NaN; torch's, which
`test_fp8.py` holds against all 256 values, take their place.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

TORCH_TYPES = {
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float32: torch.float32,
}


def correct_fp8(patch: pytest.MonkeyPatch) -> None:
    """Let the interpreter convert fp8 by torch from here on."""
    original = interpreter._convert_float

    def convert(values: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
        if tl.float8e4nv not in (source, target):
            return original(values, source, target, rounding)
        raw = torch.from_numpy(np.ascontiguousarray(values).view(np.uint8))
        converted = raw.view(TORCH_TYPES[source]).to(TORCH_TYPES[target])
        unsigned = getattr(np, f"uint{target.primitive_bitwidth}")
        return converted.contiguous().view(torch.uint8).numpy().view(unsigned).reshape(values.shape)

    patch.setattr(interpreter, "_convert_float", convert)
