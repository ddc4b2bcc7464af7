"""Multiply-adds as the hardware makes them, for Triton's interpreter: rounded once.

Triton 3.6's own rounds the product as well, and so does not show what a product's lost bits can do.
"""

from __future__ import annotations

import numpy as np
import pytest
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle


def fuse_multiply_adds(patch: pytest.MonkeyPatch) -> None:
    """Let the interpreter's `tl.fma` of float32 round once from here on."""
    original = interpreter.InterpreterBuilder.create_fma

    def create_fma(self: object, x: TensorHandle, y: TensorHandle, z: TensorHandle) -> TensorHandle:
        if z.data.dtype != np.float32:
            return original(self, x, y, z)
        exact = x.data.astype(np.float64) * y.data.astype(np.float64)  # of 48 bits, which float64 holds
        return TensorHandle((exact + z.data).astype(np.float32), z.dtype.scalar)

    patch.setattr(interpreter.InterpreterBuilder, "create_fma", create_fma)
