"""The models that steps are timed with: they are what their names say, and can be built."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cb_backend.cli.paths import checkout_path
from cb_backend.layers.layer_maker import LayerMaker
from cb_backend.layers.ops import resolve_ops
from cb_backend.models.decoder import DecoderForCausalLM
from cb_backend.models.quantization import module_formats
from cb_backend.models.registry import read_model_config
from cb_backend.parallel.group import NoGroup
from cb_backend.study.machine import model_shape

# billions of parameters, those of the input embedding left out where there are two
SIZES = {
    "qwen3-0.6b": 0.60, "llama-3.2-1b": 1.24, "llama-3.1-8b": 7.5, "gemma3-4b": 3.88, "phi-4": 14.1, "olmo3-7b": 6.9,
    "llama-3.2-3b": 3.21, "llama-2-7b": 6.61, "llama-2-13b": 12.85, "llama-3.1-70b": 69.5, "qwen3-30b-a3b": 30.2,
    "gpt-oss-20b": 20.3, "gpt-oss-120b": 116.2,
}  # fmt: skip


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.syspath_prepend(str(checkout_path("kernels")))
    import published_models
    import roofline

    return SimpleNamespace(published=published_models, names=[*roofline.MODELS, *published_models.OTHERS])


def test_every_model_is_known_here(models: SimpleNamespace) -> None:
    assert sorted(models.names) == sorted(SIZES)


@pytest.mark.parametrize("name", SIZES)
def test_models_are_as_large_as_their_names_say(name: str, models: SimpleNamespace) -> None:
    spec = models.published.spec_of(name)
    shape = model_shape(spec, "bfloat16")
    assert (shape.layer_params + shape.head_params) / 1e9 == pytest.approx(SIZES[name], rel=0.02)
    make = LayerMaker(
        ops=resolve_ops("torch"),
        dtype=torch.bfloat16,
        device=torch.device("meta"),
        group=NoGroup(),
        format_of=module_formats(None),
    )
    model = DecoderForCausalLM(spec, make, has_own_head=not spec.tie_word_embeddings, max_model_len=8)
    built = sum(placement.target.numel() for placement in model.placements())
    embedding = 0 if spec.tie_word_embeddings else shape.head_params
    assert built == pytest.approx(shape.layer_params + shape.head_params + embedding, rel=0.001)


def test_all_are_computed_in_bfloat16(models: SimpleNamespace) -> None:
    """Those whose published configs name no dtype are here without one, too."""
    assert {models.published.spec_of(name).dtype for name in SIZES} == {"bfloat16"}
    assert {name for name in SIZES if "dtype" not in models.published.config_values(name)} == {
        "gpt-oss-20b", "gpt-oss-120b",
    }  # fmt: skip


def test_gemma_slides_in_five_of_six_layers(models: SimpleNamespace) -> None:
    spec = models.published.spec_of("gemma3-4b")
    assert spec.windows[:7] == (1024,) * 5 + (0, 1024)
    assert [rope.factor for rope in spec.ropes] == [1.0, 8.0]


@pytest.mark.parametrize("label", ["w4a16", "fp8 blocks", "nvfp4", "gguf q4_k", "bf16"])
def test_a_config_can_be_written_for_weights_of_a_format(label: str, models: SimpleNamespace, tmp_path: Path) -> None:
    folder = models.published.write_config(tmp_path, "llama-3.2-1b", label)
    spec = read_model_config(folder)
    assert spec.num_layers == 16
    assert (spec.formats is None) is (label == "bf16")
    with pytest.raises(ValueError, match="'w5'"):
        models.published.write_config(tmp_path, "llama-3.2-1b", "w5")


def test_a_name_that_is_not_known_is_an_error(models: SimpleNamespace) -> None:
    with pytest.raises(KeyError, match="gpt-9"):
        models.published.spec_of("gpt-9")
