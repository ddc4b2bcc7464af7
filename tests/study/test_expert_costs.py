"""What steps of mixtures of experts cost: floors of the experts that are hit, and laws that learn their curve."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cb_backend.models.config_reader import ConfigReader
from cb_backend.models.registry import read_model_config, read_spec
from cb_backend.study.machine import model_shape
from cb_backend.study.roofline import CardLimits, decode_seconds, prefill_seconds
from cb_backend.study.step_times import fit_laws
from tests.models.tiny_checkpoints import write_checkpoint

CARD = CardLimits(4.2e12, 790e12)
QWEN = {
    "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "moe_intermediate_size": 768,
    "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
    "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "dtype": "bfloat16",
}  # fmt: skip
OSS = {
    "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880,
    "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
    "num_local_experts": 32, "num_experts_per_tok": 4, "quantization_config": {"quant_method": "mxfp4"},
    "dtype": "bfloat16",
}  # fmt: skip


@pytest.mark.parametrize(("rows", "gigabytes", "distinct"), [(1, 6.1, 8), (8, 25.8, 51.6), (64, 59.5, 125.9)])
def test_a_step_reads_the_experts_that_its_rows_hit(rows: int, gigabytes: float, distinct: float) -> None:
    shape = model_shape(read_spec(ConfigReader(QWEN)), "bfloat16")
    assert shape.experts is not None
    assert shape.experts.distinct(rows) == pytest.approx(distinct, rel=0.005)
    assert shape.bytes_read(rows) / 1e9 == pytest.approx(gigabytes, rel=0.02)


def test_packed_experts_count_by_their_own_bits() -> None:
    """gpt-oss-20b: experts in mxfp4 with scales of a byte, the rest in bf16."""
    shape = model_shape(read_spec(ConfigReader(OSS)), "bfloat16")
    assert shape.bytes_read(1) / 1e9 == pytest.approx(3.7, rel=0.06)
    assert shape.bytes_per_step / 1e9 == pytest.approx(12.6, rel=0.01)
    assert shape.experts is not None
    assert shape.experts.weight_bytes == 0.5 + 1 / 32


def test_a_token_is_multiplied_with_its_own_experts_alone() -> None:
    shape = model_shape(read_spec(ConfigReader(QWEN)), "bfloat16")
    assert shape.layer_params / 1e9 == pytest.approx(29.9, rel=0.01)
    assert shape.active_params / 1e9 == pytest.approx(2.7, rel=0.1)
    # A long prompt is bound by them, not by all.
    assert prefill_seconds(shape, CARD, [8_192]) < 0.3 * 2 * shape.layer_params * 8_192 / CARD.flops


def test_dense_layers_and_shared_experts_are_counted(tmp_path: Path) -> None:
    for name in ("qwen2-moe", "glm4-moe", "qwen3-moe"):
        spec = read_model_config(write_checkpoint(name, tmp_path / name))
        shape = model_shape(spec, "float32")
        hidden, total = spec.hidden_size, 0
        for layer in spec.layers:
            heads = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
            total += hidden * heads + spec.num_heads * spec.head_dim * hidden
            experts = getattr(layer.mlp, "num_experts", 0)
            total += 3 * hidden * layer.mlp.intermediate_size * max(1, experts) + hidden * experts
            shared = getattr(layer.mlp, "shared", None)
            total += 3 * hidden * shared.intermediate_size if shared else 0
        assert shape.layer_params == total


def test_laws_learn_the_curve_of_distinct_experts() -> None:
    """Its bend is within sizes of a power of two: what is simulated stays near the steps that were measured."""
    shape = model_shape(read_spec(ConfigReader(QWEN)), "bfloat16")
    random = np.random.default_rng(0)
    rows = random.integers(1, 257, 600)
    contexts = rows * random.integers(200, 2000, 600)
    seconds = np.array([decode_seconds(shape, CARD, int(n), int(c)) for n, c in zip(rows, contexts, strict=True)])
    shapes = np.zeros((600, 5))
    shapes[:, 0], shapes[:, 1] = rows, contexts
    decode, _, _ = fit_laws(shapes, seconds * random.normal(1.0, 0.01, 600))
    errors = [
        abs(decode.seconds((float(n), float(n * 1000), 0.0, 0.0, 0.0)) / decode_seconds(shape, CARD, n, n * 1000) - 1)
        for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 100, 128, 200, 256)
    ]
    assert np.mean(errors) < 0.05
    assert max(errors) < 0.2
