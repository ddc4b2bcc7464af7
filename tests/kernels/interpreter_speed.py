"""Triton's interpreter without what it does again and again: half of the time of the tests that it runs.

- Each call of a function within a kernel replaces the members of `triton.language` anew, though the launch has done so.
- Each sum of 32-bit integers is made in 64 bits as well, to find overflows; at the sizes of these tests there is none.
- The table of NumPy's types is built for every value.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterOptions, interpreter_builder

_POINTER = np.dtype(np.uint64)


class _Launch:
    """What a launch has replaced, and functions that it calls need not."""

    def __init__(self) -> None:
        self._original = interpreter._patch_lang
        self._modules: set[int] = set()
        self._scope: Any = None

    def patch(self, function: Any) -> Any:
        modules = _languages(function)
        if self._scope is None:
            self._scope, self._modules = self._original(function), set(modules)
            return self
        if not modules <= self._modules:
            self._original(function)
            self._modules |= modules
        return None

    def restore(self) -> None:
        scope, self._scope = self._scope, None
        scope.restore()


@functools.cache
def _languages(function: Any) -> frozenset[int]:
    return frozenset(id(value) for value in function.__globals__.values() if value is tl or value is tl.core)


_of_number = functools.cache(interpreter._get_np_dtype)


def _numpy_type(dtype: Any) -> Any:
    number = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
    return _POINTER if isinstance(number, tl.pointer_type) else _of_number(number)


def hasten() -> None:
    """From here on, for all launches of this process."""
    interpreter._patch_lang = _Launch().patch
    interpreter._get_np_dtype = _numpy_type
    check_overflows(False)


def check_overflows(is_checked: bool) -> None:
    """Whether a sum, difference or product of integers that 32 bits do not hold fails."""
    interpreter_builder.options = InterpreterOptions(sanitize_overflow=is_checked)
