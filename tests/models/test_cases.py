"""What users met in other servers with these model families; each test bears the id of its case."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cb_backend.contracts.errors import ConfigError
from tests.models.paged_model import PagedModel
from tests.models.tiny_checkpoints import random_tokens, reference_logits, write_checkpoint
from tests.models.tiny_options import ORIGINAL_LEN, ROPES

TOLERANCE = 1e-4


def edit_config(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


class TestS1TiedHead:
    def test_tied_without_head_tensor_equals_transformers(self, tmp_path: Path) -> None:
        folder = write_checkpoint("llama-tied", tmp_path)
        assert "lm_head.weight" not in load_file(folder / "model.safetensors")
        prompt = random_tokens(20, seed=1)
        paged = PagedModel(folder)
        paged.start(0, 20)
        torch.testing.assert_close(
            paged.prefill(0, prompt), reference_logits(folder, prompt, []), atol=TOLERANCE, rtol=0
        )
        assert not paged.model.has_own_head

    def test_untied_without_head_tensor_is_an_error(self, tmp_path: Path) -> None:
        folder = write_checkpoint("llama-tied", tmp_path)
        edit_config(folder, tie_word_embeddings=False)
        with pytest.raises(ConfigError, match=r"lm_head\.weight is missing in model\.safetensors.*tie_word_embeddings"):
            PagedModel(folder)

    def test_tied_config_with_another_head_in_the_file_uses_the_file(self, tmp_path: Path) -> None:
        folder = write_checkpoint("llama-gqa", tmp_path)
        edit_config(folder, tie_word_embeddings=True)
        prompt = random_tokens(20, seed=2)
        paged = PagedModel(folder)
        paged.start(0, 20)
        theirs = reference_logits(folder, prompt, [])  # transformers 5 warns and does not tie
        torch.testing.assert_close(paged.prefill(0, prompt), theirs, atol=TOLERANCE, rtol=0)
        assert paged.model.has_own_head

    def test_tied_config_with_the_same_head_in_the_file_keeps_one_copy(self, tmp_path: Path) -> None:
        folder = write_checkpoint("llama-tied", tmp_path)
        tensors = load_file(folder / "model.safetensors")
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        assert not PagedModel(folder).model.has_own_head


@pytest.mark.parametrize("heads", ["mha", "gqa", "mqa"])
def test_s3_head_dim_of_the_config(tmp_path: Path, heads: str) -> None:
    """Hidden 64, 4 heads, head_dim 24: equal to transformers (test_equal_to_transformers too), KV size right."""
    folder = write_checkpoint(f"llama-head-dim-{heads}", tmp_path)
    prompt = random_tokens(30, seed=3)
    paged = PagedModel(folder)
    paged.start(0, 30)
    torch.testing.assert_close(paged.prefill(0, prompt), reference_logits(folder, prompt, []), atol=TOLERANCE, rtol=0)
    num_kv_heads = {"mha": 4, "gqa": 2, "mqa": 1}[heads]
    assert paged.storage.layers[0].cells.shape[1:] == (2, num_kv_heads, 8, 24)
    assert paged.storage.layout.bytes_per_block == 2 * 2 * num_kv_heads * 8 * 24 * 4


@pytest.mark.parametrize("rope", sorted(ROPES))
def test_s4_rope_scaling_at_8_times_the_original_length(tmp_path: Path, rope: str) -> None:
    """Equal at short, border and long positions; and the lengths do reveal a scaling that is left out."""
    folder = write_checkpoint(f"llama-{rope}", tmp_path)
    lengths = (ORIGINAL_LEN // 2, ORIGINAL_LEN, ORIGINAL_LEN + 1, 8 * ORIGINAL_LEN)
    ours = {}
    for length in lengths:
        prompt = random_tokens(length, seed=4)
        paged = PagedModel(folder)
        paged.start(0, length)
        ours[length] = paged.prefill(0, prompt, chunk=40)
        theirs = reference_logits(folder, prompt, [])
        torch.testing.assert_close(ours[length], theirs, atol=TOLERANCE, rtol=0)
    edit_config(folder, rope_parameters={"rope_type": "default", "rope_theta": 10_000.0})
    paged = PagedModel(folder)
    paged.start(0, lengths[-1])
    unscaled = paged.prefill(0, random_tokens(lengths[-1], seed=4))
    assert (unscaled - ours[lengths[-1]]).abs().max() > 0.05


@pytest.mark.parametrize("chunk", [8, 16, 24])
def test_s6_sliding_window_with_chunked_prefill(tmp_path: Path, chunk: int) -> None:
    """Window 16, a 100-token prompt, 64 decode steps: equal to one shot and to transformers, and never NaN."""
    folder = write_checkpoint("mistral-window", tmp_path)
    tokens = random_tokens(164, seed=6)
    prompt, decode = tokens[:100], tokens[100:]
    paged = PagedModel(folder)
    for slot in (0, 1):
        paged.start(slot, 100)
    one_shot, chunked = paged.prefill(0, prompt), paged.prefill(1, prompt, chunk)
    decoded = [paged.step([(0, token), (1, token)], []) for token in decode]  # each [2, vocab]
    one_shot = torch.cat([one_shot, *(rows[:1] for rows in decoded)])
    chunked = torch.cat([chunked, *(rows[1:] for rows in decoded)])
    assert torch.isfinite(chunked).all()
    torch.testing.assert_close(chunked, one_shot, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(chunked, reference_logits(folder, prompt, decode), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", ["qwen2-mixed", "qwen3-mixed", "mistral-window"])
def test_s8_prefix_hit_longer_than_the_window(tmp_path: Path, name: str) -> None:
    """All keys are kept and a window is only a mask, so shared blocks serve full and sliding layers alike."""
    folder = write_checkpoint(name, tmp_path)
    prefix, tail, decode = random_tokens(48, seed=8), random_tokens(13, seed=9), random_tokens(5, seed=10)
    paged = PagedModel(folder)
    paged.start(0, 60)
    paged.prefill(0, prefix + random_tokens(12, seed=11))
    paged.start(1, 61, cached=(0, 48))
    ours = [paged.prefill(1, tail)] + [paged.step([(1, token)], []) for token in decode]
    theirs = reference_logits(folder, prefix + tail, decode)[48:]
    torch.testing.assert_close(torch.cat(ours), theirs, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("rope", ["default", *sorted(ROPES)])
def test_equal_cache_keys_mean_equal_keys(tmp_path: Path, rope: str) -> None:
    """Two prompts with one prefix: their cached keys agree exactly when `cache_key` lets them share blocks."""
    folder = write_checkpoint("llama-gqa" if rope == "default" else f"llama-{rope}", tmp_path)
    prefix, lengths = random_tokens(8, seed=12), (9, ORIGINAL_LEN, ORIGINAL_LEN + 1, 70, 71)
    paged = PagedModel(folder, num_slots=len(lengths))
    keys = []
    for slot, length in enumerate(lengths):
        paged.start(slot, length)
        paged.prefill(slot, prefix)
        # of layer 0, whose keys depend on the tokens and their angles alone
        keys.append(paged.storage.layers[0].cells[int(paged.block_tables[slot, 0]), 0])
    names = [paged.model.ropes.cache_key(length) for length in lengths]
    for a in range(len(lengths)):
        for b in range(a):
            assert torch.equal(keys[a], keys[b]) == (names[a] == names[b]), (lengths[a], lengths[b])
    assert len(set(names)) == {"dynamic": 4, "longrope": 2}.get(rope, 1)
