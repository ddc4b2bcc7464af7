"""Configs of much-used checkpoints, keys and gaps as published: what is served is what transformers makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from tests.models.paged_model import PagedModel
from tests.models.published_families import FAMILIES
from tests.models.tiny_checkpoints import draw_what_starts_alike, random_tokens

NUM_PROMPT, NUM_DECODE = 70, 3  # beyond windows, and beyond the lengths that ropes were trained with


@torch.inference_mode()
def write_published(name: str, folder: Path) -> torch.nn.Module:
    """The model that transformers makes of the config, with random weights, in a folder with the config as it is."""
    text = json.dumps(FAMILIES[name])
    (folder / "config.json").write_text(text)
    config = AutoConfig.from_pretrained(folder)
    torch.manual_seed(len(name))
    kind: Any = AutoModelForImageTextToText if "vision_config" in FAMILIES[name] else AutoModelForCausalLM
    model = kind.from_config(config, attn_implementation="eager").eval()
    draw_what_starts_alike(model)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(text)
    return kind.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()


@pytest.mark.parametrize("name", FAMILIES)
@torch.inference_mode()
def test_a_published_config_is_read_as_transformers_reads_it(name: str, tmp_path: Path) -> None:
    model = write_published(name, tmp_path)
    tokens = random_tokens(NUM_PROMPT + NUM_DECODE, seed=4, vocab_size=90)  # those above stand for pictures
    wanted = model(input_ids=torch.tensor([tokens])).logits[0]
    paged = PagedModel(tmp_path)
    paged.start(0, NUM_PROMPT)
    found = [paged.prefill(0, tokens[:NUM_PROMPT], 17)]
    found += [paged.step([(0, token)], []) for token in tokens[NUM_PROMPT:]]
    assert wanted.std() > 1e-3
    assert (torch.cat(found) - wanted).abs().max() < 1e-4 * max(1.0, float(wanted.abs().max()))
