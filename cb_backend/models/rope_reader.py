"""What a checkpoint says of its rotary position embeddings, in all the spellings that are in use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cb_backend.contracts.errors import ConfigError
from cb_backend.layers.rope_config import ROPE_TYPES, RopeConfig
from cb_backend.models.config_reader import ConfigReader

_MOST_POSITIONS = (1 << 31) - 1
_NEEDS_ORIGINAL_LENGTH = ("llama3", "yarn", "longrope")


def read_rope(
    reader: ConfigReader, rotary_dim: int, *, default_theta: float = 10_000.0, is_partial: bool = False
) -> RopeConfig:
    """The rope of all layers, in both spellings: `rope_theta` + `rope_scaling` (transformers 4) and `rope_parameters`.

    is_partial: of a family that may turn parts of heads only; `read_partial_rotary_factor` tells how much.
    """
    given = rope_values(reader)
    if any(isinstance(value, dict) for value in given.values.values()):
        raise ConfigError(
            f"{reader.where} asks for a rope for each layer type; supported for all layers alike: "
            f"{', '.join(ROPE_TYPES)}"
        )
    partial = read_partial_rotary_factor(reader, 1.0)
    if partial != 1.0 and not is_partial:
        raise ConfigError(
            f"{reader.where}: partial_rotary_factor is {partial}; these families rotate whole heads (1.0)"
        )
    return rope_of(reader, given, rotary_dim, default_theta)


def read_ropes_by_kind(
    reader: ConfigReader, rotary_dim: int, thetas: Mapping[str, tuple[str, float]]
) -> dict[str, RopeConfig]:
    """The rope of each kind of layers; `thetas`: where else its base is told and its default, by kind.

    Nested in `rope_parameters`; or, as transformers 4 wrote it, a `rope_scaling` that is of full attention only.
    """
    nested = reader.get("rope_parameters", dict, None)
    if nested is not None and not nested.keys() & thetas.keys():
        raise ConfigError(
            f"{reader.where}: rope_parameters must tell of each kind of layers ({', '.join(thetas)}), found "
            f"{', '.join(nested) or 'nothing'}"
        )
    ropes = {}
    for kind, (key, default) in thetas.items():
        values = (nested or {}).get(kind) or {}
        if not isinstance(values, dict):
            raise ConfigError(f"{reader.where}: rope_parameters of {kind} must be an object, found {values!r}")
        if kind == "full_attention":
            values = {**values, **(reader.get("rope_scaling", dict, None) or {})}
        given = ConfigReader({key: reader.values.get(key), **values}, f"{reader.where} (rope parameters of {kind})")
        given.values.setdefault("rope_theta", given.get(key, float, default))
        ropes[kind] = rope_of(reader, given, rotary_dim, default)
    return ropes


def read_partial_rotary_factor(reader: ConfigReader, default: float) -> float:
    """Which part of each head is turned: said among the rope parameters, or beside them."""
    value: float = rope_values(reader).get(
        "partial_rotary_factor", float, reader.get("partial_rotary_factor", float, default)
    )
    return value


def rope_values(reader: ConfigReader) -> ConfigReader:
    """What is said of the rope, or of several ropes by the kind of their layers."""
    given = reader.get("rope_scaling", dict, None) or reader.get("rope_parameters", dict, None) or {}
    return ConfigReader({"rope_theta": reader.values.get("rope_theta"), **given}, f"{reader.where} (rope parameters)")


def rope_of(reader: ConfigReader, rope: ConfigReader, rotary_dim: int, default_theta: float) -> RopeConfig:
    """The rope that `rope` tells of, in a model that `reader` tells of."""
    max_position_embeddings = reader.positive("max_position_embeddings")
    rope_type = rope.get("rope_type", str, rope.get("type", str, "default"))
    if rope_type not in ROPE_TYPES:
        raise ConfigError(
            f"{reader.where} asks for rope_type {rope_type!r}; supported for all layers alike: {', '.join(ROPE_TYPES)}"
        )
    shared: dict[str, Any] = {
        "rope_type": rope_type,
        "theta": rope.positive_float("rope_theta", default_theta),
        "max_position_embeddings": max_position_embeddings,
    }
    if rope_type in _NEEDS_ORIGINAL_LENGTH:
        # Some files keep the pretraining length beside the rope parameters; that one wins, as in transformers.
        inside = rope.positive("original_max_position_embeddings", max_position_embeddings)
        shared["original_max_position_embeddings"] = reader.positive("original_max_position_embeddings", inside)
    config = RopeConfig(**shared, **_ROPE_READERS[rope_type](rope, shared, rotary_dim))
    if (length := config.factor * max_position_embeddings) > _MOST_POSITIONS:
        raise ConfigError(f"{rope.where}: factor {config.factor} asks for a context of {length:g} tokens; lower it")
    return config


def _read_no_scaling(_rope: ConfigReader, _shared: dict[str, Any], _rotary_dim: int) -> dict[str, Any]:
    return {}


def _read_factor(rope: ConfigReader, _shared: dict[str, Any], _rotary_dim: int) -> dict[str, Any]:
    return {"factor": rope.positive_float("factor")}


def _read_llama3(rope: ConfigReader, _shared: dict[str, Any], _rotary_dim: int) -> dict[str, Any]:
    values = {key: rope.positive_float(key) for key in ("factor", "low_freq_factor", "high_freq_factor")}
    if values["high_freq_factor"] <= values["low_freq_factor"]:
        raise ConfigError(
            f"{rope.where}: high_freq_factor ({values['high_freq_factor']}) must be above low_freq_factor "
            f"({values['low_freq_factor']})"
        )
    return values


def _length_ratio(shared: dict[str, Any]) -> float:
    return shared["max_position_embeddings"] / shared["original_max_position_embeddings"]


def _read_yarn(rope: ConfigReader, shared: dict[str, Any], _rotary_dim: int) -> dict[str, Any]:
    return {
        "factor": rope.positive_float("factor", _length_ratio(shared)),
        "attention_factor": rope.get("attention_factor", float, None),
        "beta_fast": rope.get("beta_fast", float, 0.0) or 32.0,
        "beta_slow": rope.get("beta_slow", float, 0.0) or 1.0,
        "mscale": rope.get("mscale", float, 0.0),
        "mscale_all_dim": rope.get("mscale_all_dim", float, 0.0),
        "truncate": rope.get("truncate", bool, True),
    }


def _read_numbers(rope: ConfigReader, key: str) -> tuple[float, ...]:
    """A list of numbers above 0, each checked as a value of its own would be."""
    values = rope.get(key, list)
    entries = ConfigReader({f"{key}[{index}]": value for index, value in enumerate(values)}, rope.where)
    return tuple(entries.positive_float(name) for name in entries.values)


def _read_longrope(rope: ConfigReader, shared: dict[str, Any], rotary_dim: int) -> dict[str, Any]:
    factors = {key: _read_numbers(rope, key) for key in ("short_factor", "long_factor")}
    for key, values in factors.items():
        if len(values) != rotary_dim // 2:
            raise ConfigError(
                f"{rope.where}: {key} has {len(values)} entries; head_dim {rotary_dim} needs {rotary_dim // 2}"
            )
    return {
        **factors,
        "factor": rope.positive_float("factor", _length_ratio(shared)),
        "attention_factor": rope.get("attention_factor", float, None),
    }


_ROPE_READERS = {
    "default": _read_no_scaling,
    "linear": _read_factor,
    "dynamic": _read_factor,
    "llama3": _read_llama3,
    "yarn": _read_yarn,
    "longrope": _read_longrope,
}
