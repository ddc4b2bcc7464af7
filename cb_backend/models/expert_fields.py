"""What families with experts read alike from `config.json`. Defaults are the family's."""

from __future__ import annotations

from typing import Any

from cb_backend.contracts.errors import ConfigError
from cb_backend.layers.layer_spec import MLPSpec, MoESpec
from cb_backend.models.config_reader import ConfigReader
from cb_backend.models.spec_fields import num_layers, read_activation

_MOST_EXPERTS = 1024  # beyond, a damaged file would keep the start busy for hours


def read_experts(
    reader: ConfigReader,
    *,
    default_experts: int,
    default_top_k: int,
    size_key: str = "intermediate_size",
    **options: Any,
) -> MoESpec:
    """The number of experts stands under one of three names. options: those fields that the family settles.

    Raises `ConfigError` for more experts a token than there are, and for an activation that experts do not have.
    """
    num_experts = _num_experts(reader, default_experts)
    top_k = reader.positive("num_experts_per_tok", default_top_k)
    if top_k > num_experts:
        raise ConfigError(f"{reader.where}: num_experts_per_tok is {top_k}, but there are {num_experts} experts")
    if "activation" not in options and (activation := read_activation(reader)) != "silu":
        raise ConfigError(f"{reader.where}: hidden_act is {activation!r}; experts are supported with silu")
    return MoESpec(
        num_experts=num_experts, top_k=top_k, intermediate_size=reader.positive(size_key), **options
    )  # fmt: skip


def _num_experts(reader: ConfigReader, default: int) -> int:
    """transformers 5 writes some of these files with the name that another family has."""
    given = {key: reader.values[key] for key in ("num_experts", "num_local_experts", "n_routed_experts")
             if reader.values.get(key) is not None}  # fmt: skip
    if len(set(map(str, given.values()))) > 1:
        told = ", ".join(f"{key} is {value!r}" for key, value in given.items())
        raise ConfigError(f"{reader.where}: {told}; they mean the same and must agree")
    return reader.positive(next(iter(given), "num_experts"), default, most=_MOST_EXPERTS)


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
