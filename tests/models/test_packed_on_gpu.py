"""Files of every packed format, read and repacked onto a GPU and computed by the kernels there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.models.quantised_models import FORMATS, logits, pair

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CUDA = torch.device("cuda")
ROOM = 3  # how much farther than the CPU's twins in bfloat16 the kernels may be from the exact logits


@pytest.mark.parametrize("name", FORMATS)
def test_a_quantised_model_is_the_model_of_its_numbers(name: str, tmp_path: Path) -> None:
    """In float32 but for rounding; in bfloat16, which the packed products take, as near as the twins are."""
    config, writer = FORMATS[name]
    plain, quantised = pair(tmp_path, "llama", config, writer)
    wanted = logits(plain)
    torch.testing.assert_close(logits(quantised, backend="triton", device=CUDA).cpu(), wanted, atol=1e-3, rtol=0)
    rounded = logits(quantised, backend="triton", device=CUDA, dtype=torch.bfloat16).cpu().float()
    twins = logits(quantised, dtype=torch.bfloat16).float()
    assert 0 < (rounded - wanted).norm() < ROOM * (twins - wanted).norm()
