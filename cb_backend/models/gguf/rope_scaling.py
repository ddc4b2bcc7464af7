"""How a GGUF file says that its rotary embeddings are stretched, in the words of `config.json`.

There are two ways: keys `ARCH.rope.scaling.*`, and a tensor of factors, one a frequency, by which Llama 3.1 and later
carry their scaling. What is neither honoured nor without effect is refused by name.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cb_backend.contracts.errors import ConfigError
from cb_backend.models.config_reader import ConfigReader
from cb_backend.models.gguf.source import GgufSource

ROPE_FACTORS = "rope_freqs.weight"

_DEFAULT_THETA = 10_000.0
# Scale the attention or its temperature in ways that config.json has no word for; the value that changes nothing.
_NEUTRAL = {
    "attn_factor": 1.0, "yarn_attn_factor": 1.0, "yarn_ext_factor": 1.0, "yarn_log_multiplier": 0.0, "alpha": 0.0,
}  # fmt: skip


def read_rope_parameters(source: GgufSource, reader: ConfigReader, head_dim: int) -> dict[str, Any]:
    """The `rope_parameters` of `config.json`. Raises `ConfigError` for a scaling that is not supported."""
    prefix = f"{source.architecture}.rope."
    theta = reader.positive_float(prefix + "freq_base", _DEFAULT_THETA)
    scaling = _read_scaling(reader, prefix)
    if ROPE_FACTORS not in source.tensors:
        return {"rope_theta": theta, **scaling}
    if scaling["rope_type"] != "default":
        raise ConfigError(
            f"{source.name} stretches its rotary embeddings twice: by {prefix}scaling.type {scaling['rope_type']!r} "
            f"and by the tensor {ROPE_FACTORS}; that is not supported"
        )
    return {"rope_theta": theta, **_read_factors(source, reader, head_dim)}


def _read_scaling(reader: ConfigReader, prefix: str) -> dict[str, Any]:
    keys = {key: f"{prefix}scaling.{key}" for key in ("type", "factor", "original_context_length", *_NEUTRAL)}
    # Before the keys had a room of their own, a linear factor was all there was.
    factor = reader.get(keys["factor"], float, reader.get(prefix + "scale_linear", float, 0.0))
    kind = reader.get(keys["type"], str, "linear" if factor not in (0.0, 1.0) else "none")
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return {"rope_type": "default"}
    if kind not in ("linear", "yarn"):
        raise ConfigError(f"{reader.where}: {keys['type']} is {kind!r}; supported: none, linear, yarn")
    for key, neutral in _NEUTRAL.items():
        if (value := reader.get(keys[key], float, neutral)) != neutral:
            raise ConfigError(f"{reader.where}: {keys[key]} is {value}; supported is {neutral} only")
    if factor <= 0:
        raise ConfigError(f"{reader.where}: {keys['factor']} is {factor}; {kind} needs a number above 0")
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    given = {"original_max_position_embeddings": reader.positive(keys["original_context_length"])}
    for key in ("beta_fast", "beta_slow"):
        if value := reader.get(f"{prefix}scaling.yarn_{key}", float, 0.0):
            given[key] = value
    return {"rope_type": "yarn", "factor": factor, **given}


def _read_factors(source: GgufSource, reader: ConfigReader, head_dim: int) -> dict[str, Any]:
    """Any factors at all are a `longrope` that has the same ones at every length and leaves cos and sin unscaled."""
    tensor = source.tensors[ROPE_FACTORS]
    if tensor.kind != "F32" or tensor.shape != (head_dim // 2,):
        raise ConfigError(
            f"{source.name}: tensor {ROPE_FACTORS} is {tensor.kind} {list(tensor.shape)}; heads of {head_dim} need "
            f"{head_dim // 2} numbers of F32"
        )
    if not (np.isfinite(tensor.packed) & (tensor.packed > 0)).all():
        raise ConfigError(f"{source.name}: tensor {ROPE_FACTORS} holds numbers that are not above 0; fetch it again")
    factors = [float(value) for value in tensor.packed]
    return {
        "rope_type": "longrope",
        "short_factor": factors,
        "long_factor": factors,
        "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": reader.positive(f"{source.architecture}.context_length"),
    }
