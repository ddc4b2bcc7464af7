"""Checkpoints of pictures and text with the model of text in few bits: towers of pictures are left as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, Mistral3Config, Mistral3ForConditionalGeneration

from tests.models.quantised_checkpoints import write_pair
from tests.models.quantised_models import FORMATS
from tests.models.test_text_parts import PIXTRAL, SIGLIP, SIZES, logits_of

TEXT: dict[str, Any] = {**SIZES, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
TOWERS = ["re:vision_tower.*", "re:multi_modal_projector.*", "re:.*lm_head"]


def make(name: str) -> torch.nn.Module:
    if name == "gemma3":
        gemma = Gemma3Config(text_config=TEXT, vision_config=SIGLIP, mm_tokens_per_image=4, image_token_index=90)
        return Gemma3ForConditionalGeneration(gemma)
    text = {**TEXT, "model_type": "ministral3", "tie_word_embeddings": False}
    return Mistral3ForConditionalGeneration(Mistral3Config(text_config=text, vision_config=PIXTRAL))


@pytest.mark.parametrize("name", ["gemma3", "mistral3"])
@pytest.mark.parametrize(
    "form",
    ["w4a16, zeros", "w4a16, act-order", "awq 32, bf16 scales", "gptq act-order", "fp8 blocks", "nvfp4", "mxfp4"],
)
def test_the_model_of_text_in_few_bits(name: str, form: str, tmp_path: Path) -> None:
    config, writer = FORMATS[form]
    torch.manual_seed(5)
    plain, quantised = tmp_path / "plain", tmp_path / "quantised"
    make(name).save_pretrained(plain)  # type: ignore[operator]
    quantised.mkdir()
    if "config_groups" in config:
        config = {**config, "ignore": TOWERS}
    write_pair(plain, quantised, config, writer, is_kept=lambda module: "vision" in module)
    wanted = logits_of(plain)
    assert wanted.std() > 0.05
    torch.testing.assert_close(logits_of(quantised), wanted, atol=1e-4, rtol=0)
