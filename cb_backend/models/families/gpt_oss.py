"""gpt-oss: sinks in attention, every second layer slides, experts with biases and a clamped gate."""

from __future__ import annotations

from cb_backend.layers.layer_spec import ExpertNames
from cb_backend.models.config_reader import ConfigReader
from cb_backend.models.expert_fields import read_experts, refuse_other_swiglu
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
    read_norm,
    read_window,
    windows_of,
)

_NAMES = ExpertNames(router="router", gate="gate_up_proj", up="gate_up_proj", down="down_proj")
_ROPE = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


def read_spec(reader: ConfigReader) -> ModelSpec:
    """Raises `ConfigError` for a missing key or an unsupported option."""
    reader = reader.with_defaults(
        max_position_embeddings=131_072, num_key_value_heads=8, intermediate_size=2_880, sliding_window=128
    )
    if reader.values.get("rope_parameters") is None and reader.values.get("rope_scaling") is None:
        reader = reader.with_defaults(rope_scaling=_ROPE)
    has_bias = reader.get("attention_bias", bool, True)
    attention = read_attention(reader, default_head_dim=64, has_qkv_bias=has_bias, has_o_bias=has_bias, has_sinks=True)
    refuse_other_swiglu(reader)
    experts = read_experts(
        reader,
        default_experts=128,
        default_top_k=4,
        activation="clamped_swiglu",
        scoring="softmax_of_top_k",
        has_router_bias=True,
        has_bias=True,
        storage="interleaved",
        names=_NAMES,
    )
    kinds = read_layer_types(reader) or [FULL if index % 2 else SLIDING for index in range(num_layers(reader))]
    return ModelSpec(
        **read_basics(reader, default_dtype="bfloat16"),  # published configs name none
        attention=attention,
        norm=read_norm(reader, default_eps=1e-5, rounds_first=False),
        ropes=(read_rope(reader, attention.rotary_dim, default_theta=150_000.0),),
        layers=read_layers(reader, mlp=experts, windows=windows_of(kinds, read_window(reader, 128))),
    )
