"""OLMoE: Llama with experts in every layer; q and k are normed over all heads at once."""

from __future__ import annotations

from cb_backend.contracts.errors import ConfigError
from cb_backend.models.config_reader import ConfigReader
from cb_backend.models.expert_fields import read_experts
from cb_backend.models.rope_reader import read_rope
from cb_backend.models.spec import ModelSpec
from cb_backend.models.spec_fields import read_attention, read_basics, read_layers, read_norm, refuse_window


def read_spec(reader: ConfigReader) -> ModelSpec:
    """Raises `ConfigError` for a missing key or an unsupported option."""
    reader = reader.with_defaults(max_position_embeddings=4_096, intermediate_size=2_048)
    refuse_window(reader)
    if reader.get("clip_qkv", float, None) is not None:
        raise ConfigError(f"{reader.where}: clip_qkv is {reader.values['clip_qkv']}; supported is null")
    has_bias = reader.get("attention_bias", bool, False)
    norm = read_norm(reader, default_eps=1e-5)
    attention = read_attention(reader, has_qkv_bias=has_bias, has_o_bias=has_bias, qk_norm=norm, is_qk_norm_whole=True)
    experts = read_experts(
        reader, default_experts=64, default_top_k=8, renormalise=reader.get("norm_topk_prob", bool, False)
    )
    return ModelSpec(
        **read_basics(reader),
        attention=attention,
        norm=norm,
        ropes=(read_rope(reader, attention.rotary_dim),),
        layers=read_layers(reader, mlp=experts),
    )
