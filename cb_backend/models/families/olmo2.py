"""OLMo 2: what blocks give is normed, not what they get; q and k are normed over all heads at once."""

from __future__ import annotations

from cb_backend.models.config_reader import ConfigReader
from cb_backend.models.rope_reader import read_rope
from cb_backend.models.spec import POST_NORMS, ModelSpec
from cb_backend.models.spec_fields import read_attention, read_basics, read_layers, read_mlp, read_norm, refuse_window


def read_spec(reader: ConfigReader) -> ModelSpec:
    """Raises `ConfigError` for a missing key or an unsupported option."""
    reader = reader.with_defaults(max_position_embeddings=2_048)
    refuse_window(reader)
    has_bias = reader.get("attention_bias", bool, False)
    norm = read_norm(reader, default_eps=1e-5, rounds_first=False)
    attention = read_attention(reader, has_qkv_bias=has_bias, has_o_bias=has_bias, qk_norm=norm, is_qk_norm_whole=True)
    return ModelSpec(
        **read_basics(reader),
        attention=attention,
        norm=norm,
        norms=POST_NORMS,
        ropes=(read_rope(reader, attention.rotary_dim),),
        layers=read_layers(reader, mlp=read_mlp(reader)),
    )
