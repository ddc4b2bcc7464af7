"""What of a model one device of a group has, as a specification: for whoever sizes a cache or predicts a step."""

from __future__ import annotations

from dataclasses import replace

from cb_backend.contracts.errors import ConfigError
from cb_backend.layers.layer_spec import MoESpec
from cb_backend.models.spec import ModelSpec
from cb_backend.parallel.shares import share_of_experts, share_of_heads


def shard_spec(spec: ModelSpec, num_ranks: int) -> ModelSpec:
    """The model with the heads of one rank; all ranks have as many. What its layers and vocabulary are stays whole.

    Raises `ConfigError` where the heads cannot be shared out.
    """
    attention = spec.attention
    heads, kv_heads = share_of_heads(attention.num_heads, attention.num_kv_heads, 0, num_ranks)
    return replace(spec, attention=replace(attention, num_heads=heads.size, num_kv_heads=kv_heads.size))


def check_shares(spec: ModelSpec, num_ranks: int, *, spreads_experts: bool) -> None:
    """Raises `ConfigError` where so many devices cannot share the model. spreads_experts: each is to have some of the
    experts whole."""
    shard_spec(spec, num_ranks)
    if not spreads_experts or num_ranks == 1:
        return
    counts = {layer.mlp.num_experts for layer in spec.layers if isinstance(layer.mlp, MoESpec)}
    if not counts:
        raise ConfigError("engine argument enable_expert_parallel is on, but the model has no experts; remove it")
    for num_experts in counts:
        share_of_experts(num_experts, 0, num_ranks)
