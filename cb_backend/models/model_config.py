"""What a checkpoint's `config.json` says, as one frozen value that all architectures share.

The families differ in what they may say and in their defaults: each family's file builds its `ModelConfig` with the
readers below. Absent keys get the defaults transformers gives them, because published files rely on those. This module
does not know tensors, files or devices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from cb_backend.errors import ConfigError
from cb_backend.layers.rope_config import ROPE_TYPES, RopeConfig
from cb_backend.models.quantization import read_quantization

FULL_ATTENTION = 0  # in `ModelConfig.windows`: the layer sees every earlier token

_MISSING = object()
_MOST = (1 << 31) - 1
_MOST_LAYERS = 10_000  # beyond, a damaged file would keep the start busy for hours
_FLOAT_DTYPES = ("float32", "float16", "bfloat16")
_NEEDS_ORIGINAL_LENGTH = ("llama3", "yarn", "longrope")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One decoder-only model: sizes, options, and what generation needs to know."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int  # need not be hidden_size / num_heads
    rms_norm_eps: float
    rope: RopeConfig
    windows: tuple[int, ...]  # [num_layers] newest tokens a query sees, its own included; 0 = all
    max_position_embeddings: int
    tie_word_embeddings: bool
    has_qkv_bias: bool = False
    has_o_bias: bool = False
    has_mlp_bias: bool = False
    has_qk_norm: bool = False  # RMSNorm over each head of q and k, before RoPE
    dtype: str = "float32"  # of the checkpoint
    quantization: str | None = None  # of the checkpoint's matrices: fp8 | None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def max_context_len(self) -> int:
        """Longest context the checkpoint is meant for: `max_position_embeddings`, stretched by the rope scaling.

        For linear, dynamic and yarn files may give the length before the stretch; the others give the one after it.
        """
        if self.rope.rope_type in ("linear", "dynamic"):
            return int(self.max_position_embeddings * self.rope.factor)
        if self.rope.rope_type == "yarn":
            stretched = int(self.rope.original_max_position_embeddings * self.rope.factor)
            return max(self.max_position_embeddings, stretched)
        return self.max_position_embeddings


class JsonReader:
    """Typed access to `config.json`; every complaint names the key and the value."""

    def __init__(self, values: dict[str, Any], where: str = "config.json") -> None:
        self.values = values
        self.where = where

    def get(self, key: str, kind: type, default: Any = _MISSING) -> Any:
        """The value as int, float, bool or str; `default` where it is absent or null. Raises `ConfigError`."""
        value = self.values.get(key)
        if value is None:
            if default is _MISSING:
                raise ConfigError(f"{self.where} does not set {key!r}; the checkpoint is incomplete")
            return default
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ConfigError(f"{self.where}: {key!r} must be of type {kind.__name__}, found {value!r}")
        if isinstance(value, float) and not math.isfinite(value):  # JSON has no such numbers, but Python's writer does
            raise ConfigError(f"{self.where}: {key!r} is {value}; it must be a finite number")
        return value

    def positive(self, key: str, default: Any = _MISSING, most: int = _MOST) -> int:
        value = self.get(key, int, default)
        if not 1 <= value <= most:
            raise ConfigError(
                f"{self.where}: {key!r} is {value}; it must be at least 1"
                + (f" and at most {most}" if value > most else "")
            )
        return value

    def positive_float(self, key: str, default: Any = _MISSING) -> float:
        value = self.get(key, float, default)
        if value <= 0:
            raise ConfigError(f"{self.where}: {key!r} is {value}; it must be above 0")
        return value


def common_fields(reader: JsonReader, *, default_kv_heads: int | None, default_head_dim: int | None) -> dict[str, Any]:
    """The `ModelConfig` fields every family reads alike.

    The two defaults are the family's for absent keys; None: as many as heads, and hidden_size / heads.
    """
    _refuse_what_changes_the_arithmetic(reader)
    hidden_size, num_heads = reader.positive("hidden_size"), reader.positive("num_attention_heads")
    num_kv_heads = reader.positive("num_key_value_heads", default_kv_heads or num_heads)
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"{reader.where}: num_attention_heads ({num_heads}) is not a multiple of num_key_value_heads "
            f"({num_kv_heads})"
        )
    head_dim = reader.positive("head_dim", default_head_dim or hidden_size // num_heads)
    if head_dim % 2:
        raise ConfigError(f"{reader.where}: head_dim is {head_dim}; rotary embeddings need an even number")
    max_position_embeddings = reader.positive("max_position_embeddings")
    return {
        "model_type": reader.get("model_type", str),
        "vocab_size": reader.positive("vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": reader.positive("intermediate_size"),
        "num_layers": reader.positive("num_hidden_layers", most=_MOST_LAYERS),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": reader.get("rms_norm_eps", float, 1e-6),
        "rope": read_rope(reader, max_position_embeddings, head_dim),
        "max_position_embeddings": max_position_embeddings,
        "tie_word_embeddings": reader.get("tie_word_embeddings", bool, False),
        "dtype": _read_dtype(reader),
        "quantization": read_quantization(reader.values.get("quantization_config"), reader.where),
        "eos_token_ids": read_token_ids(reader, "eos_token_id"),
    }


def read_windows(reader: JsonReader, num_layers: int) -> tuple[int, ...]:
    """Window per layer for families where only some layers slide (qwen2, qwen3)."""
    is_sliding = reader.get("use_sliding_window", bool, False)
    window = read_window(reader, 4096) if is_sliding else FULL_ATTENTION
    first_sliding = reader.get("max_window_layers", int, 28)
    layer_types = reader.get("layer_types", list, None)
    if layer_types is None:
        return tuple(window if index >= first_sliding else FULL_ATTENTION for index in range(num_layers))
    unknown = sorted({str(kind) for kind in layer_types} - {"full_attention", "sliding_attention"})
    if unknown or len(layer_types) != num_layers:
        raise ConfigError(
            f"{reader.where}: layer_types must name full_attention or sliding_attention for each of {num_layers} "
            f"layers; found {len(layer_types)} entries" + (f" with {', '.join(unknown)}" if unknown else "")
        )
    return tuple(window if kind == "sliding_attention" else FULL_ATTENTION for kind in layer_types)


def read_window(reader: JsonReader, default: int) -> int:
    """`sliding_window`: null switches it off, absent means the family's default."""
    if "sliding_window" in reader.values and reader.values["sliding_window"] is None:
        return FULL_ATTENTION
    return reader.positive("sliding_window", default)


def read_token_ids(reader: JsonReader, key: str) -> tuple[int, ...]:
    """A key that holds one id, a list of ids, or nothing."""
    value = reader.values.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token_id, int) and not isinstance(token_id, bool) for token_id in ids):
        raise ConfigError(f"{reader.where}: {key!r} must be a token id or a list of them, found {value!r}")
    return tuple(dict.fromkeys(ids))


def read_rope(reader: JsonReader, max_position_embeddings: int, head_dim: int) -> RopeConfig:
    """Both spellings: `rope_theta` + `rope_scaling` (transformers 4) and `rope_parameters` (transformers 5)."""
    given = reader.get("rope_scaling", dict, None) or reader.get("rope_parameters", dict, None) or {}
    rope = JsonReader({"rope_theta": reader.values.get("rope_theta"), **given}, f"{reader.where} (rope parameters)")
    rope_type = rope.get("rope_type", str, rope.get("type", str, "default"))
    if rope_type not in ROPE_TYPES or any(isinstance(value, dict) for value in given.values()):
        found = f"rope_type {rope_type!r}" if rope_type not in ROPE_TYPES else "a rope for each layer type"
        raise ConfigError(f"{reader.where} asks for {found}; supported for all layers alike: {', '.join(ROPE_TYPES)}")
    partial = rope.get("partial_rotary_factor", float, reader.get("partial_rotary_factor", float, 1.0))
    if partial != 1.0:
        raise ConfigError(
            f"{reader.where}: partial_rotary_factor is {partial}; these families rotate whole heads (1.0)"
        )
    theta = rope.positive_float("rope_theta", 10_000.0)
    shared: dict[str, Any] = {
        "rope_type": rope_type, "theta": theta, "max_position_embeddings": max_position_embeddings
    }  # fmt: skip
    if rope_type in _NEEDS_ORIGINAL_LENGTH:
        # Some files keep the pretraining length beside the rope parameters; that one wins, as in transformers.
        inside = rope.positive("original_max_position_embeddings", max_position_embeddings)
        shared["original_max_position_embeddings"] = reader.positive("original_max_position_embeddings", inside)
    return RopeConfig(**shared, **_ROPE_READERS[rope_type](rope, shared, head_dim))


def _read_no_scaling(_rope: JsonReader, _shared: dict[str, Any], _head_dim: int) -> dict[str, Any]:
    return {}


def _read_factor(rope: JsonReader, _shared: dict[str, Any], _head_dim: int) -> dict[str, Any]:
    return {"factor": rope.positive_float("factor")}


def _read_llama3(rope: JsonReader, _shared: dict[str, Any], _head_dim: int) -> dict[str, Any]:
    return {key: rope.positive_float(key) for key in ("factor", "low_freq_factor", "high_freq_factor")}


def _length_ratio(shared: dict[str, Any]) -> float:
    return shared["max_position_embeddings"] / shared["original_max_position_embeddings"]


def _read_yarn(rope: JsonReader, shared: dict[str, Any], _head_dim: int) -> dict[str, Any]:
    return {
        "factor": rope.positive_float("factor", _length_ratio(shared)),
        "attention_factor": rope.get("attention_factor", float, None),
        "beta_fast": rope.get("beta_fast", float, 0.0) or 32.0,
        "beta_slow": rope.get("beta_slow", float, 0.0) or 1.0,
        "mscale": rope.get("mscale", float, 0.0),
        "mscale_all_dim": rope.get("mscale_all_dim", float, 0.0),
        "truncate": rope.get("truncate", bool, True),
    }


def _read_longrope(rope: JsonReader, shared: dict[str, Any], head_dim: int) -> dict[str, Any]:
    factors = {key: tuple(float(value) for value in rope.get(key, list)) for key in ("short_factor", "long_factor")}
    for key, values in factors.items():
        if len(values) != head_dim // 2:
            raise ConfigError(
                f"{rope.where}: {key} has {len(values)} entries; head_dim {head_dim} needs {head_dim // 2}"
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


def _refuse_what_changes_the_arithmetic(reader: JsonReader) -> None:
    activation = reader.get("hidden_act", str, "silu")
    if activation not in ("silu", "swish"):
        raise ConfigError(f"{reader.where}: hidden_act is {activation!r}; supported: silu")


def _read_dtype(reader: JsonReader) -> str:
    dtype = reader.get("dtype", str, reader.get("torch_dtype", str, "float32"))
    if dtype not in _FLOAT_DTYPES:
        raise ConfigError(f"{reader.where}: dtype is {dtype!r}; supported: {', '.join(_FLOAT_DTYPES)}")
    return dtype
