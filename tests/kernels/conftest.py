"""Where the kernels run in these tests: on the GPU if there is one, else interpreted on the CPU."""

from __future__ import annotations

import pytest
import torch

from cb_backend.kernels.launch import IS_INTERPRETING

if IS_INTERPRETING:
    from .interpreter_fp8 import correct_fp8


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where kernels can run. Without it a launcher would fall back to its twin and be compared with itself."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        return torch.device("cuda")
    assert IS_INTERPRETING, "triton was imported before tests/conftest.py set TRITON_INTERPRET"
    return torch.device("cpu")


@pytest.fixture(autouse=True)
def _correct_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    if IS_INTERPRETING:
        correct_fp8(monkeypatch)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
