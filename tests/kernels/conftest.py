"""Where the kernels run in these tests: on the GPU if there is one, else interpreted on the CPU; on poisoned memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from cb_backend.kernels.launch import IS_INTERPRETING
from tests.kernels.compiled import compile_all

NAN_OF_FP8 = 0x7F

if IS_INTERPRETING:
    from .interpreter_fma import fuse_multiply_adds
    from .interpreter_fp8 import correct_fp8
    from .interpreter_speed import check_overflows, hasten

    hasten()


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where kernels can run. Without it a launcher would fall back to its twin and be compared with itself."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        return torch.device("cuda")
    assert IS_INTERPRETING, "triton was imported before tests/conftest.py set TRITON_INTERPRET"
    return torch.device("cpu")


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    """What the compiler reports of every one of the module's `CASES`, by name."""
    return compile_all(request.module.CASES)


@pytest.fixture(autouse=True)
def _check_overflows(request: pytest.FixtureRequest) -> None:
    if IS_INTERPRETING:
        check_overflows(request.node.get_closest_marker("long") is not None)


@pytest.fixture(autouse=True)
def _correct_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    if IS_INTERPRETING:
        correct_fp8(monkeypatch)


@pytest.fixture(autouse=True)
def _fuse_multiply_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    if IS_INTERPRETING:
        fuse_multiply_adds(monkeypatch)


@pytest.fixture
def rows_add_up_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted, a row of a product has the same bits wherever it stands in its tile, as on a GPU.

    Products are numpy's there, and the BLAS behind it adds up some rows of a tile in another order, on AMD's CPUs.
    """
    if IS_INTERPRETING:
        monkeypatch.setattr(np, "matmul", lambda a, b, dtype: np.einsum("mk,kn->mn", a, b, dtype=dtype))


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What launchers allocate holds rubbish: a result that is not written, or is read before, cannot go unnoticed.

    Not in a capture: what was filled there would be filled by every replay.
    """

    def poisoned(allocate: Any) -> Any:
        def allocate_and_fill(*args: Any, **kwargs: Any) -> torch.Tensor:
            memory: torch.Tensor = allocate(*args, **kwargs)
            if memory.is_cuda and torch.cuda.is_current_stream_capturing():
                return memory
            if memory.dtype == torch.float8_e4m3fn:
                memory.view(torch.uint8).fill_(NAN_OF_FP8)
            elif memory.is_floating_point():
                memory.fill_(float("nan"))
            else:
                memory.fill_(-77 if memory.dtype.is_signed else 1)
            return memory

        return allocate_and_fill

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
