"""What families with experts read alike from `config.json`. Defaults are the family's."""

from __future__ import annotations

from typing import Any

from cb_backend.contracts.errors import ConfigError
from cb_backend.kernels.expert_activation import SWIGLU_ALPHA, SWIGLU_LIMIT
from cb_backend.layers.layer_spec import MLPSpec, MoESpec
from cb_backend.models.config_reader import ConfigReader
from cb_backend.models.spec_fields import num_layers, read_activation

# transformers 5 writes some of these files with the name that another family has; gpt-oss's have two for the second.
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_TOP_K = ("num_experts_per_tok", "experts_per_token", "num_experts_per_token")
_MOST_EXPERTS = 1024  # beyond, a damaged file would keep the start busy for hours


def read_experts(
    reader: ConfigReader,
    *,
    default_experts: int,
    default_top_k: int,
    size_key: str = "intermediate_size",
    **options: Any,
) -> MoESpec:
    """Numbers of experts stand under one of three names each. options: those fields that the family settles.

    Raises `ConfigError` for more experts a token than there are, and for an activation that experts do not have.
    """
    num_experts = reader.positive(_name_of(_NUM_EXPERTS, reader), default_experts, most=_MOST_EXPERTS)
    top_k_name = _name_of(_TOP_K, reader)
    top_k = reader.positive(top_k_name, default_top_k)
    if top_k > num_experts:
        raise ConfigError(f"{reader.where}: {top_k_name} is {top_k}, but there are {num_experts} experts")
    if "activation" not in options and (activation := read_activation(reader)) != "silu":
        raise ConfigError(f"{reader.where}: hidden_act is {activation!r}; experts are supported with silu")
    return MoESpec(
        num_experts=num_experts, top_k=top_k, intermediate_size=reader.positive(size_key), **options
    )  # fmt: skip


def _name_of(names: tuple[str, ...], reader: ConfigReader) -> str:
    """That of these names which is used. Raises `ConfigError` where several are and differ."""
    given = {key: reader.values[key] for key in names if reader.values.get(key) is not None}
    if len(set(map(str, given.values()))) > 1:
        told = ", ".join(f"{key} is {value!r}" for key, value in given.items())
        raise ConfigError(f"{reader.where}: {told}; they mean the same and must agree")
    return next(iter(given), names[0])


def refuse_other_swiglu(reader: ConfigReader) -> None:
    """Of the clamped gate: raises `ConfigError` for constants that are not those of the products."""
    for key, served in (("swiglu_limit", SWIGLU_LIMIT), ("swiglu_alpha", SWIGLU_ALPHA)):
        value = reader.get(key, float, served)
        if value != served:
            raise ConfigError(f"{reader.where}: {key} is {value}; supported is {served}")


def read_sparse_layers(reader: ConfigReader, experts: MoESpec, mlp: MLPSpec) -> list[MLPSpec | MoESpec]:
    """Of Qwen's families: the block of each layer. Every `decoder_sparse_step`-th has experts, unless it is among
    `mlp_only_layers`. Raises `ConfigError` for a layer that there is not.
    """
    count, step = num_layers(reader), reader.positive("decoder_sparse_step", 1)
    dense = reader.get("mlp_only_layers", list, [])
    if wrong := [index for index in dense if type(index) is not int or not 0 <= index < count]:
        raise ConfigError(f"{reader.where}: mlp_only_layers names {wrong[0]!r}; layers are 0 to {count - 1}")
    return [
        experts if index not in dense and (index + 1) % step == 0 else mlp for index in range(count)
    ]  # fmt: skip
