"""GLM-4 (0414): norms around both blocks, biases on q, k and v, half of each head turned, neighbour with neighbour."""

from __future__ import annotations

from cb_backend.models.config_reader import ConfigReader
from cb_backend.models.rope_reader import read_partial_rotary_factor, read_rope
from cb_backend.models.spec import BlockNorms, ModelSpec
from cb_backend.models.spec_fields import read_attention, read_basics, read_layers, read_mlp, read_norm, refuse_window

_NORMS = BlockNorms(
    before_attention="input_layernorm",
    after_attention="post_self_attn_layernorm",
    before_mlp="post_attention_layernorm",
    after_mlp="post_mlp_layernorm",
)


def read_spec(reader: ConfigReader) -> ModelSpec:
    """Raises `ConfigError` for a missing key or an unsupported option."""
    reader = reader.with_defaults(max_position_embeddings=131_072, num_key_value_heads=2)
    refuse_window(reader)
    attention = read_attention(
        reader,
        default_head_dim=128,
        partial_rotary_factor=read_partial_rotary_factor(reader, 0.5),
        has_qkv_bias=reader.get("attention_bias", bool, True),
        is_interleaved=True,
    )
    return ModelSpec(
        **read_basics(reader),
        attention=attention,
        norm=read_norm(reader, default_eps=1.5625e-7),
        norms=_NORMS,
        ropes=(read_rope(reader, attention.rotary_dim, is_partial=True),),
        layers=read_layers(reader, mlp=read_mlp(reader, is_gate_up_fused=True)),
    )
