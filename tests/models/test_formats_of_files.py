"""Modules that files have in 16 bits though `quantization_config` does not leave them out: they stay as they are."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cb_backend.contracts.errors import ConfigError
from cb_backend.layers.fp8_linear import Fp8Linear
from cb_backend.models.registry import read_model_config
from cb_backend.models.replacement import ModelWeights
from tests.models.paged_model import PagedModel
from tests.models.quantised_checkpoints import write_pair
from tests.models.quantised_models import FORMATS, GPTQ, logits, of_group, pair
from tests.models.quantised_writers import write_gptq
from tests.models.test_fp8_weights import COMPRESSED, DYNAMIC_FP8, load, quantise_checkpoint
from tests.models.test_packed_text_parts import make
from tests.models.test_text_parts import logits_of
from tests.models.tiny_checkpoints import write_checkpoint

FILE = "model.safetensors"
DOWN = "model.layers.0.mlp.down_proj"
IN_MEMORY = "model.language_model.layers.0.mlp.down_proj"
ATTENTION = [["self_attn.k_proj", "self_attn.v_proj", "self_attn.q_proj"], ["self_attn.o_proj"]]
# (format, what its configuration says of the modules that are left, a part of their names)
LEFT: dict[str, tuple[str, dict[str, Any], str]] = {
    "blocks of modules": ("gptq 64", {"modules_in_block_to_quantize": ATTENTION}, "mlp"),
    "a part of a name": ("nvfp4 of ModelOpt", {"ignore": ["lm_head", "model.layers.0.mlp"]}, "layers.0.mlp"),
    "a name in memory": ("w4a16", {"ignore": ["lm_head", IN_MEMORY]}, "layers.0.mlp.down_proj"),
    "a name in memory, int8": ("w8a8", {"ignore": ["lm_head", IN_MEMORY]}, "layers.0.mlp.down_proj"),
    "no word of it": ("awq 64", {}, "layers.0.mlp.down_proj"),
    "blocks of fp8": ("fp8 blocks", {"modules_to_not_convert": [IN_MEMORY]}, "layers.0.mlp.down_proj"),
    "a part of qkv": ("w4a16", {"ignore": ["lm_head"]}, "layers.0.self_attn.k_proj"),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_what_the_files_have_in_16_bits_stays_so(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    form, said, part = LEFT[name]
    config, writer = FORMATS[form]
    plain, quantised = pair(tmp_path, "llama", {**config, **said}, writer, is_kept=lambda module: part in module)
    with caplog.at_level(logging.INFO, "cb_backend.models"):
        torch.testing.assert_close(logits(quantised), logits(plain), atol=1e-4, rtol=0)
    count = sum(part in key for key in load_file(quantised / FILE) if key.endswith("_proj.weight"))
    told = [record.getMessage() for record in caplog.records if "unquantised in the files" in record.getMessage()]
    assert len(told) == 1, "one line, of the quantised checkpoint"
    assert told[0].startswith(f"{count} modules are unquantised in the files, though quantization_config does not")
    assert part in told[0]


@pytest.mark.parametrize("part", ["experts", "mlp.experts.0.", "self_attn"])
def test_experts_that_are_left(part: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """All of them; of some alone it is told, as of other experts of two formats. Routers are not counted."""
    config, writer = FORMATS["awq 64"]
    plain, quantised = pair(tmp_path, "qwen3-moe", config, writer, is_kept=lambda module: part in module)
    if part == "mlp.experts.0.":
        with pytest.raises(ConfigError, match=r"tensor model\.layers\.0\.mlp\.experts\.1\.\w+\.weight is missing"):
            PagedModel(quantised)
        return
    with caplog.at_level(logging.INFO, "cb_backend.models"):
        torch.testing.assert_close(logits(quantised), logits(plain), atol=1e-4, rtol=0)
    count = 2 * 4 * 3 if part == "experts" else 2 * 4
    assert f"{count} modules are unquantised in the files" in caplog.text


def test_a_checkpoint_that_is_told_rightly_gets_no_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config, writer = FORMATS["w4a16"]
    plain, quantised = pair(
        tmp_path, "llama", {**config, "ignore": ["lm_head", DOWN]}, writer, is_kept=lambda module: module == DOWN
    )
    with caplog.at_level(logging.INFO, "cb_backend.models"):
        torch.testing.assert_close(logits(quantised), logits(plain), atol=1e-4, rtol=0)
    assert "unquantised in the files" not in caplog.text


@pytest.mark.parametrize("config", [DYNAMIC_FP8, COMPRESSED], ids=["fp8", "compressed-tensors"])
def test_one_matrix_of_an_fp8_checkpoint_is_not_rounded(config: dict[str, Any], tmp_path: Path) -> None:
    folder = write_checkpoint("llama-gqa", tmp_path)
    before = load_file(folder / FILE)
    quantise_checkpoint(folder, config, is_per_tensor=False, scale_shape="as is")
    tensors = load_file(folder / FILE)
    del tensors[f"{DOWN}.weight_scale"]
    save_file({**tensors, f"{DOWN}.weight": before[f"{DOWN}.weight"]}, folder / FILE, {"format": "pt"})
    layers = load(folder).layers
    assert not isinstance(layers[0].mlp.down_proj, Fp8Linear)
    assert torch.equal(layers[0].mlp.down_proj.weight, before[f"{DOWN}.weight"].bfloat16())
    assert isinstance(layers[1].mlp.down_proj, Fp8Linear)


def test_what_an_argument_asks_for_is_rounded_all_the_same(tmp_path: Path) -> None:
    model = load(write_checkpoint("llama-gqa", tmp_path), quantization="fp8")
    assert isinstance(model.layers[0].mlp.down_proj, Fp8Linear)


@pytest.mark.parametrize("ignored", ["language_model.model.layers.1.mlp", "model.language_model.layers.1.mlp"])
@pytest.mark.parametrize("name", ["gemma3", "mistral3"])
def test_names_as_saved_and_names_in_memory(name: str, ignored: str, tmp_path: Path) -> None:
    """Of checkpoints of pictures and text, which call the model of text one thing or the other."""
    config, writer = FORMATS["w4a16, zeros"]
    torch.manual_seed(5)
    plain, quantised = tmp_path / "plain", tmp_path / "quantised"
    make(name).save_pretrained(plain)  # type: ignore[operator]
    quantised.mkdir()
    config = {**config, "ignore": ["re:.*vision_tower.*", "re:.*lm_head", f"{ignored}.down_proj"]}
    write_pair(
        plain, quantised, config, writer,
        is_kept=lambda module: "vision" in module or module.endswith("layers.1.mlp.down_proj"),
    )  # fmt: skip
    torch.testing.assert_close(logits_of(quantised), logits_of(plain), atol=1e-4, rtol=0)


def test_a_model_of_other_formats_is_no_replacement(tmp_path: Path) -> None:
    """A configuration alone does not tell which modules are packed, so both may have the same."""
    config, writer = FORMATS["w8a8"]
    folders = []
    for name, is_kept in (("all", lambda module: False), ("some", lambda module: module == DOWN)):
        (tmp_path / name).mkdir()
        folders.append(pair(tmp_path / name, "llama", config, writer, is_kept=is_kept)[1])
    for own, other in (folders, folders[::-1]):
        paged = PagedModel(own)
        weights = ModelWeights(paged.model, own, read_model_config(own), quantization=None, has_kv_scales=False)
        with pytest.raises(ConfigError, match=rf"{DOWN}\.weight.*; load it as a model of its own$"):
            weights.check(other)
        weights.check(Path(shutil.copytree(own, tmp_path / f"same-{own.parent.name}")))


@pytest.mark.parametrize(("other", "has_group_index", "fault"), [
    ("gptq v2", True, r"the new weights are stored as GptqReader\(.*is_v2=True.*\), the model's as Gptq.*is_v2=False"),
    ("gptq act-order", False, r"\.qweight is of another format than the model's"),
])  # fmt: skip
def test_what_the_models_readers_would_take_for_something_else_is_no_replacement(
    other: str, has_group_index: bool, fault: str, tmp_path: Path
) -> None:
    """The names and shapes of the tensors that the model reads are the same."""
    for name in ("own", "other"):
        (tmp_path / name).mkdir()
    _, own = pair(tmp_path / "own", "llama", {**GPTQ, "group_size": 32}, of_group(write_gptq, 32))
    if not has_group_index:
        tensors = {name: tensor for name, tensor in load_file(own / FILE).items() if not name.endswith(".g_idx")}
        save_file(tensors, own / FILE, {"format": "pt"})
    _, new = pair(tmp_path / "other", "llama", *FORMATS[other])
    paged = PagedModel(own)
    weights = ModelWeights(paged.model, own, read_model_config(own), quantization=None, has_kv_scales=False)
    with pytest.raises(ConfigError, match=rf"{fault}.*; load it as a model of its own$"):
        weights.check(new)
    weights.check(Path(shutil.copytree(own, tmp_path / "same")))
