"""The same model on other ground: half precision, and the Triton kernels on a GPU, both against transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.models.paged_model import PagedModel
from tests.models.tiny_checkpoints import load_reference, random_tokens, reference_logits, write_checkpoint

PROMPT, DECODE = random_tokens(70, seed=1), random_tokens(5, seed=2)


def run(paged: PagedModel) -> Tensor:
    """Logits of the prompt in chunks and of some decode steps, float32 on the CPU."""
    paged.start(1, len(PROMPT))
    logits = [paged.prefill(1, PROMPT, chunk=32)] + [paged.step([(1, token)], []) for token in DECODE]
    return torch.cat(logits).float().cpu()


@torch.inference_mode()
def test_bfloat16_is_as_close_to_float32_as_transformers_is(tmp_path: Path) -> None:
    """Roundings differ, so the measure is transformers' own distance between the two precisions."""
    folder = write_checkpoint("qwen3", tmp_path)
    exact = reference_logits(folder, PROMPT, DECODE)
    theirs = load_reference(folder).to(torch.bfloat16)(torch.tensor([PROMPT + DECODE])).logits[0].float()
    ours = run(PagedModel(folder, dtype=torch.bfloat16))
    assert (ours - exact).abs().mean() < 1.5 * (theirs - exact).abs().mean()
    assert (ours - exact).abs().mean() > 0  # it did compute in bfloat16


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name",
    [
        *(
            "llama-tied",
            "llama-longrope",
            "mistral-window",
            "qwen2-mixed",
            "qwen3",
            "qwen3-mixed",
            "granite",
            "smollm3",
        ),
        *("phi3-partial", "olmo2", "olmo3", "exaone4-hybrid", "gemma2", "gemma3", "glm4", "ministral3"),
    ],
)
def test_triton_on_the_gpu_equals_transformers_on_the_cpu(tmp_path: Path, name: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    folder = write_checkpoint(name, tmp_path)
    exact = reference_logits(folder, PROMPT, DECODE)
    cuda = torch.device("cuda")
    paged = PagedModel(folder, backend="triton", device=cuda, block_size=16)
    # TF32 products inside the kernels: three digits less than float32.
    torch.testing.assert_close(run(paged), exact, atol=2e-2, rtol=0)
    twin = run(PagedModel(folder, backend="torch", device=cuda, block_size=16))
    torch.testing.assert_close(twin, exact, atol=1e-3, rtol=0)
