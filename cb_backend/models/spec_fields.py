"""What most families read alike from `config.json`: parts of a `ModelSpec`. Defaults are the family's."""

from __future__ import annotations

from typing import Any

from cb_backend.errors import ConfigError
from cb_backend.layers.layer_spec import FULL_ATTENTION, AttentionSpec, LayerSpec, MLPSpec, NormSpec
from cb_backend.models.config_reader import ConfigReader
from cb_backend.models.quantization import read_quantization

_MOST_LAYERS = 10_000  # beyond, a damaged file would keep the start busy for hours
_FLOAT_DTYPES = ("float32", "float16", "bfloat16")


def read_basics(reader: ConfigReader) -> dict[str, Any]:
    """The `ModelSpec` fields that no family reads in its own way."""
    return {
        "model_type": reader.get("model_type", str),
        "vocab_size": reader.positive("vocab_size"),
        "hidden_size": reader.positive("hidden_size"),
        "max_position_embeddings": reader.positive("max_position_embeddings"),
        "tie_word_embeddings": reader.get("tie_word_embeddings", bool, False),
        "dtype": _read_dtype(reader),
        "quantization": read_quantization(reader.values.get("quantization_config"), reader.where),
        "eos_token_ids": reader.token_ids("eos_token_id"),
    }


def read_attention(
    reader: ConfigReader,
    *,
    default_kv_heads: int | None = None,
    default_head_dim: int | None = None,
    has_qkv_bias: bool = False,
    has_o_bias: bool = False,
    qk_norm: NormSpec | None = None,
) -> AttentionSpec:
    """Defaults of None: as many KV heads as heads, and a head_dim of hidden_size / heads."""
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
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        has_qkv_bias=has_qkv_bias,
        has_o_bias=has_o_bias,
        qk_norm=qk_norm,
    )


def read_norm(reader: ConfigReader) -> NormSpec:
    return NormSpec(eps=reader.get("rms_norm_eps", float, 1e-6))


def read_mlp(reader: ConfigReader, *, has_bias: bool = False) -> MLPSpec:
    activation = reader.get("hidden_act", str, "silu")
    if activation not in ("silu", "swish"):
        raise ConfigError(f"{reader.where}: hidden_act is {activation!r}; supported: silu")
    return MLPSpec(intermediate_size=reader.positive("intermediate_size"), has_bias=has_bias)


def num_layers(reader: ConfigReader) -> int:
    return reader.positive("num_hidden_layers", most=_MOST_LAYERS)


def read_layers(reader: ConfigReader, *, mlp: MLPSpec, windows: tuple[int, ...] | None = None) -> tuple[LayerSpec, ...]:
    """Layers that differ in their windows only; None: none has one."""
    if windows is None:
        windows = (FULL_ATTENTION,) * num_layers(reader)
    return tuple(LayerSpec(mlp=mlp, window=window) for window in windows)


def read_qwen_windows(reader: ConfigReader) -> tuple[int, ...]:
    """Window of each layer for families where only some layers slide, and only if that is switched on."""
    is_sliding = reader.get("use_sliding_window", bool, False)
    window = read_window(reader, 4096) if is_sliding else FULL_ATTENTION
    first_sliding = reader.get("max_window_layers", int, 28)
    kinds = read_layer_types(reader)
    if kinds is None:
        return tuple(window if index >= first_sliding else FULL_ATTENTION for index in range(num_layers(reader)))
    return tuple(window if kind == "sliding_attention" else FULL_ATTENTION for kind in kinds)


def read_layer_types(reader: ConfigReader) -> list[str] | None:
    """`layer_types`, one of full_attention and sliding_attention a layer; None where they are not given."""
    kinds: list[Any] | None = reader.get("layer_types", list, None)
    if kinds is None:
        return None
    count = num_layers(reader)
    unknown = sorted({str(kind) for kind in kinds} - {"full_attention", "sliding_attention"})
    if unknown or len(kinds) != count:
        raise ConfigError(
            f"{reader.where}: layer_types must name full_attention or sliding_attention for each of {count} "
            f"layers; found {len(kinds)} entries" + (f" with {', '.join(unknown)}" if unknown else "")
        )
    return kinds


def read_window(reader: ConfigReader, default: int) -> int:
    """`sliding_window`: null switches it off, absent means the family's default."""
    if "sliding_window" in reader.values and reader.values["sliding_window"] is None:
        return FULL_ATTENTION
    return reader.positive("sliding_window", default)


def _read_dtype(reader: ConfigReader) -> str:
    dtype = reader.get("dtype", str, reader.get("torch_dtype", str, "float32"))
    if dtype not in _FLOAT_DTYPES:
        raise ConfigError(f"{reader.where}: dtype is {dtype!r}; supported: {', '.join(_FLOAT_DTYPES)}")
    return dtype
