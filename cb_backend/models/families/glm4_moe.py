"""GLM-4.5: dense layers, then experts chosen by sigmoids in groups and one for all tokens; half of each head turned."""

from __future__ import annotations

from cb_backend.contracts.errors import ConfigError
from cb_backend.layers.layer_spec import ExpertNames, MLPSpec, MoESpec
from cb_backend.models.config_reader import ConfigReader
from cb_backend.models.expert_fields import read_experts
from cb_backend.models.rope_reader import read_partial_rotary_factor, read_rope
from cb_backend.models.spec import ModelSpec
from cb_backend.models.spec_fields import (
    num_layers,
    read_attention,
    read_basics,
    read_layers,
    read_mlp,
    read_norm,
    refuse_window,
)


def read_spec(reader: ConfigReader) -> ModelSpec:
    """Raises `ConfigError` for a missing key or an unsupported option."""
    reader = reader.with_defaults(
        max_position_embeddings=131_072, num_key_value_heads=8, intermediate_size=10_944, moe_intermediate_size=1_408
    )
    refuse_window(reader)
    norm = read_norm(reader, default_eps=1e-5)
    attention = read_attention(
        reader,
        partial_rotary_factor=read_partial_rotary_factor(reader, 0.5),
        has_qkv_bias=reader.get("attention_bias", bool, False),
        qk_norm=norm if reader.get("use_qk_norm", bool, False) else None,
    )
    experts, dense = _read_experts(reader), read_mlp(reader)
    count, first = num_layers(reader), reader.get("first_k_dense_replace", int, 1)
    return ModelSpec(
        **read_basics(reader),
        attention=attention,
        norm=norm,
        ropes=(read_rope(reader, attention.rotary_dim, is_partial=True),),
        layers=read_layers(reader, mlp=[dense if index < first else experts for index in range(count)]),
        # Layers behind the last one predict further tokens.
        ignored=rf"model\.layers\.({'|'.join(str(count + index) for index in range(_num_further(reader)))})\..*",
    )


def _num_further(reader: ConfigReader) -> int:
    return max(1, reader.get("num_nextn_predict_layers", int, reader.get("num_mtp_layers", int, 1)))


def _read_experts(reader: ConfigReader) -> MoESpec:
    groups, top_groups = reader.positive("n_group", 1), reader.positive("topk_group", 1)
    size = reader.positive("moe_intermediate_size")
    experts = read_experts(
        reader,
        default_experts=128,
        default_top_k=8,
        size_key="moe_intermediate_size",
        scoring="sigmoid",
        renormalise=reader.get("norm_topk_prob", bool, True),
        scale=reader.positive_float("routed_scaling_factor", 1.0),
        num_groups=groups,
        top_groups=top_groups,
        is_routed_in_float32=True,
        has_score_bias=True,
        shared=MLPSpec(intermediate_size=size * reader.positive("n_shared_experts", 1)),
        names=ExpertNames(shared="shared_experts"),
    )
    per_group = experts.num_experts // groups
    if experts.num_experts % groups or top_groups > groups or top_groups * per_group < experts.top_k:
        raise ConfigError(
            f"{reader.where}: {experts.top_k} of {experts.num_experts} experts cannot be chosen from {top_groups} of "
            f"{groups} groups (num_experts_per_tok, n_routed_experts, topk_group, n_group)"
        )
    return experts
