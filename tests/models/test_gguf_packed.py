"""GGUF files served in their own bits: logits are what transformers computes with the numbers they stand for."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM, GgufConfig, LlamaConfig, Qwen2Config, Qwen3Config

from cb_backend.layers.packed_linear import PackedLinear
from cb_backend.layers.separate_linear import SeparateLinear
from cb_backend.models.checkpoint import convert_gguf, resolve_checkpoint
from cb_backend.models.gguf_blocks import BLOCK_KINDS
from tests.models.gguf_files import GgufFile, gguf_of, random_rows, tiny_gguf
from tests.models.paged_model import PagedModel
from tests.models.tiny_checkpoints import random_tokens

pytestmark = pytest.mark.usefixtures("cache")

FAMILIES = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
SIZES = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 97, "head_dim": 64, "max_position_embeddings": 128,
}  # fmt: skip
MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
# About what gives numbers like a model's: elements of the K kinds are multiplied by scales of up to 63.
SIZE = {"Q8_0": 4e-4, "Q4_K": 1e-4, "Q5_K": 5e-5, "Q6_K": 3e-5}


def file_of(family: str, folder: Path, kinds: dict[str, str], is_tied: bool = False) -> GgufFile:
    """A model whose matrices are blocks of random bytes; kinds: of matrices by name, "" of all others."""
    torch.manual_seed(5)
    config = FAMILIES[family](**SIZES, tie_word_embeddings=is_tied)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    file = gguf_of(folder)
    names = [f"blk.{layer}.{matrix}.weight" for layer in range(2) for matrix in MATRICES]
    for seed, name in enumerate([*names, *(() if is_tied else ("output.weight",))]):
        kind = next((kinds[part] for part in name.split(".") if part in kinds), kinds[""])
        file.kinds[name] = gguf.GGMLQuantizationType[kind]
        size = SIZE.get(kind, 0.005)
        file.tensors[name] = random_rows(kind, *file.tensors[name].shape, seed=seed, size=size)
    return file


def logits_of(folder: Path, tokens: list[int]) -> torch.Tensor:
    paged = PagedModel(folder)
    paged.start(0, len(tokens))
    return paged.prefill(0, tokens, 13)


def assert_as_transformers_reads(path: Path) -> Path:
    """Returns the converted folder."""
    folder = resolve_checkpoint(str(path))
    judge = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    tokens = random_tokens(30, seed=5)
    with torch.inference_mode():
        expected = judge.eval()(torch.tensor([tokens])).logits[0]
    assert expected.std() > 0.02, "numbers that matter"
    torch.testing.assert_close(logits_of(folder, tokens), expected, atol=1e-4, rtol=0)
    return folder


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "F16", "BF16"])
@pytest.mark.parametrize("name", ["llama-head-dim-gqa", "qwen2-bias"])
def test_quantised_files_are_what_transformers_reads_of_them(kind: str, name: str, tmp_path: Path) -> None:
    """Rows that no whole blocks divide stay as they are, so some matrices of a layer are blocks and some are not."""
    _, file = tiny_gguf(name, tmp_path / "source")
    assert_as_transformers_reads(file.quantised(gguf.GGMLQuantizationType[kind]).write(tmp_path / "tiny.gguf"))


@pytest.mark.parametrize(
    ("family", "kind"), [*(("llama", kind) for kind in BLOCK_KINDS), ("qwen2", "Q4_K"), ("qwen2", "Q8_0")]
)
def test_every_kind_of_blocks(family: str, kind: str, tmp_path: Path) -> None:
    """Rows of q and k are in pairs in llama's files, and in no other's."""
    path = file_of(family, tmp_path / "source", {"": kind}).write(tmp_path / "tiny.gguf")
    layer = PagedModel(assert_as_transformers_reads(path)).model.layers[1]
    for product in (layer.self_attn.qkv_proj, layer.self_attn.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj):
        assert isinstance(product, PackedLinear)
        assert [piece.weight.kind for piece in product.pieces] == [BLOCK_KINDS[kind].kind], "one product"
    assert layer.mlp.gate_up_proj.pieces[0].weight.is_gated


@pytest.mark.parametrize(
    ("kinds", "words"),
    [
        ({"": "Q4_K", "attn_v": "Q6_K", "ffn_down": "Q6_K", "output": "Q6_K"}, "5 Q6_K"),
        ({"": "Q4_K", "attn_v": "Q5_K", "ffn_up": "Q3_K"}, "2 Q3_K"),
        ({"": "Q2_K", "output": "Q4_0"}, "14 Q2_K"),
        ({"": "Q8_0", "attn_q": "Q4_0", "ffn_gate": "Q5_1"}, None),
    ],
)
def test_mixed_kinds_are_products_of_their_own(
    kinds: dict[str, str], words: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = file_of("llama", tmp_path / "source", kinds).write(tmp_path / "tiny.gguf")
    with caplog.at_level(logging.INFO, "cb_backend.models"):
        folder = assert_as_transformers_reads(path)
    told = next(message for message in caplog.messages if "keep the file's bits" in message)
    assert told.startswith("tiny.gguf: matrices that keep the file's bits: ")
    assert (words is None) == ("written out" not in told)
    assert words is None or told.endswith(f"; written out in the model's dtype: {words}")
    layer = PagedModel(folder).model.layers[0]
    is_separate = isinstance(layer.self_attn.qkv_proj, SeparateLinear)
    assert is_separate == (len({kinds.get(name, kinds[""]) for name in ("attn_q", "attn_k", "attn_v")}) > 1)


def test_a_tied_model_has_its_head_from_the_embedding(tmp_path: Path) -> None:
    path = file_of("qwen2", tmp_path / "source", {"": "Q4_0"}, is_tied=True).write(tmp_path / "tiny.gguf")
    assert not PagedModel(assert_as_transformers_reads(path)).model.has_own_head


@pytest.mark.parametrize(("kind", "most"), [("Q4_0", 0.20), ("Q4_K", 0.27), ("Q8_0", 0.30), ("Q5_K", 0.40)])
def test_memory_is_a_share_of_what_the_numbers_take(kind: str, most: float, tmp_path: Path) -> None:
    """On the disk as in the file, and on the device with scales a group: of float32's four bytes."""
    path = file_of("llama", tmp_path / "source", {"": kind}).write(tmp_path / "tiny.gguf")
    folder, plain = convert_gguf(path), convert_gguf(path, is_packed=False)
    assert folder != plain
    sizes = [(each / "model.safetensors").stat().st_size for each in (folder, plain)]
    assert sizes[0] < 0.5 * sizes[1]
    for layer in PagedModel(folder).model.layers:
        for product in (layer.self_attn.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj):
            out_size, in_size = product.size
            assert product.pieces[0].weight.num_bytes <= most * 4 * out_size * in_size


def test_a_model_of_16_bits_keeps_scales_of_16_bits(tmp_path: Path) -> None:
    path = file_of("llama", tmp_path / "source", {"": "Q4_K"}).write(tmp_path / "tiny.gguf")
    folder = convert_gguf(path)
    half = PagedModel(folder, dtype=torch.bfloat16)
    weight = half.model.layers[0].mlp.down_proj.pieces[0].weight
    assert weight.scales.dtype == torch.float16
    assert 8 * weight.num_bytes == 5 * SIZES["hidden_size"] * SIZES["intermediate_size"]  # 5 bits each
    tokens = random_tokens(20, seed=2)
    half.start(0, 20)
    found, wanted = half.prefill(0, tokens).float(), logits_of(folder, tokens)
    assert float((found - wanted).norm() / wanted.norm()) < 0.02


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_written_out_conversion_is_a_plain_checkpoint(family: str, tmp_path: Path) -> None:
    path = file_of(family, tmp_path / "source", {"": "Q4_1"}).write(tmp_path / "tiny.gguf")
    plain = convert_gguf(path, is_packed=False)
    assert "quantization_config" not in json.loads((plain / "config.json").read_text())
    tokens = random_tokens(20, seed=2)
    torch.testing.assert_close(logits_of(convert_gguf(path), tokens), logits_of(plain, tokens), atol=1e-5, rtol=0)
