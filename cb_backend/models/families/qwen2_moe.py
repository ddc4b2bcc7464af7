"""Qwen2 with experts: biases on q, k and v, and a gated expert that every token goes through; some layers may slide."""

from __future__ import annotations

from cb_backend.layers.layer_spec import FULL_ATTENTION, MLPSpec
from cb_backend.models.config_reader import ConfigReader
from cb_backend.models.expert_fields import read_experts, read_sparse_layers
from cb_backend.models.rope_reader import read_rope
from cb_backend.models.spec import ModelSpec
from cb_backend.models.spec_fields import (
    FULL,
    SLIDING,
    num_layers,
    read_attention,
    read_basics,
    read_layer_types,
    read_layers,
    read_mlp,
    read_norm,
    read_window,
    windows_of,
)


def read_spec(reader: ConfigReader) -> ModelSpec:
    """Raises `ConfigError` for a missing key or an unsupported option."""
    reader = reader.with_defaults(
        max_position_embeddings=32_768,
        num_key_value_heads=16,
        intermediate_size=5632,
        moe_intermediate_size=1408,
        shared_expert_intermediate_size=5632,
    )
    attention = read_attention(reader, has_qkv_bias=reader.get("qkv_bias", bool, True))
    experts = read_experts(
        reader,
        default_experts=60,
        default_top_k=4,
        size_key="moe_intermediate_size",
        renormalise=reader.get("norm_topk_prob", bool, False),
        shared=MLPSpec(intermediate_size=reader.positive("shared_expert_intermediate_size")),
        has_shared_gate=True,
    )
    return ModelSpec(
        **read_basics(reader),
        attention=attention,
        norm=read_norm(reader),
        ropes=(read_rope(reader, attention.rotary_dim),),
        layers=read_layers(
            reader, mlp=read_sparse_layers(reader, experts, read_mlp(reader)), windows=_read_windows(reader)
        ),
    )


def _read_windows(reader: ConfigReader) -> tuple[int, ...]:
    """Where layers are not told apart, every second one of the first `max_window_layers` slides."""
    is_sliding = reader.get("use_sliding_window", bool, False)
    window = read_window(reader, 4096) if is_sliding else FULL_ATTENTION
    most = reader.get("max_window_layers", int, 28)
    kinds = read_layer_types(reader) or [
        FULL if index % 2 or index >= most else SLIDING for index in range(num_layers(reader))
    ]
    return windows_of(kinds, window)
