"""What most families read alike from `config.json`: parts of a `ModelSpec`. Defaults are the family's."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from cb_backend.contracts.errors import ConfigError
from cb_backend.layers.layer_spec import FULL_ATTENTION, AttentionSpec, LayerSpec, MLPSpec, MoESpec, NormSpec
from cb_backend.layers.rope_config import RopeConfig
from cb_backend.models.config_reader import ConfigReader
from cb_backend.models.quantization import quantization_values, read_quantization
from cb_backend.models.stored_dtype import DTYPE_KEYS

logger = logging.getLogger("cb_backend.engine")

SLIDING, FULL = "sliding_attention", "full_attention"  # the kinds in layer_types
_MOST_LAYERS = 10_000  # beyond, a damaged file would keep the start busy for hours
# Those of transformers that are served, and what `MLPSpec` calls them
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_MOST_HEAD_DIM = 4096  # beyond, a damaged file would fill the memory with tables of angles
_FLOAT_DTYPES = ("float32", "float16", "bfloat16")


def read_basics(reader: ConfigReader, *, is_tied: bool = False, default_dtype: str = "float32") -> dict[str, Any]:
    """The `ModelSpec` fields that no family reads in its own way. is_tied: the head is the embedding's by default.

    default_dtype: where neither the config nor a file of weights tells one; transformers' own is float32.
    """
    vocab_size = reader.positive("vocab_size")
    quantization = read_quantization(quantization_values(reader.values), reader.where)
    if not reader.get("is_causal", bool, True):
        raise ConfigError(
            f"{reader.where}: is_causal is false; supported are models whose tokens see earlier ones only"
        )
    return {
        "model_type": reader.get("model_type", str),
        "vocab_size": vocab_size,
        "hidden_size": reader.positive("hidden_size"),
        "max_position_embeddings": reader.positive("max_position_embeddings"),
        "tie_word_embeddings": reader.get("tie_word_embeddings", bool, is_tied),
        "dtype": _read_dtype(reader, default_dtype),
        "quantization": None if quantization is None else quantization.name,
        "formats": None if quantization is None else quantization.formats,
        "eos_token_ids": within_vocabulary(reader.token_ids("eos_token_id"), vocab_size, "eos_token_id"),
    }


def within_vocabulary(token_ids: Sequence[int], vocab_size: int, name: str) -> tuple[int, ...]:
    """Those of `token_ids` that the model can sample. The others, which could never come, are told in the log."""
    if outside := sorted({token_id for token_id in token_ids if not 0 <= token_id < vocab_size}):
        logger.warning("%s names %s, outside the vocabulary (0 to %d); ignored", name, outside, vocab_size - 1)
    return tuple(dict.fromkeys(token_id for token_id in token_ids if 0 <= token_id < vocab_size))


def read_attention(
    reader: ConfigReader,
    *,
    default_head_dim: int | None = None,
    partial_rotary_factor: float = 1.0,
    scale: float | None = None,
    **options: Any,
) -> AttentionSpec:
    """Null, or absent without a default: as many KV heads as heads, a head_dim of hidden_size / heads.

    scale: None is head_dim ** -0.5.

    options: those fields of the result that the family settles.
    """
    hidden_size, num_heads = reader.positive("hidden_size"), reader.positive("num_attention_heads")
    num_kv_heads = reader.positive("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"{reader.where}: num_attention_heads ({num_heads}) is not a multiple of num_key_value_heads "
            f"({num_kv_heads})"
        )
    head_dim = reader.positive("head_dim", default_head_dim or hidden_size // num_heads, most=_MOST_HEAD_DIM)
    if head_dim % 2:
        raise ConfigError(f"{reader.where}: head_dim is {head_dim}; rotary embeddings need an even number")
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rotary_dim=_rotary_dim(reader, head_dim, partial_rotary_factor),
        scale=head_dim**-0.5 if scale is None else scale,
        **options,
    )


def _rotary_dim(reader: ConfigReader, head_dim: int, partial: float) -> int:
    rotary_dim = int(head_dim * partial)
    if not 2 <= rotary_dim <= head_dim or rotary_dim % 2:
        raise ConfigError(
            f"{reader.where}: partial_rotary_factor is {partial}, by which {rotary_dim} of a head's {head_dim} "
            "dimensions would be turned; it must be an even number of at least 2 of them"
        )
    return rotary_dim


def read_norm(reader: ConfigReader, *, default_eps: float = 1e-6, **options: Any) -> NormSpec:
    """options: those fields of the result that the family settles."""
    return NormSpec(eps=reader.positive_float("rms_norm_eps", default_eps), **options)


def read_mlp(
    reader: ConfigReader, *, key: str = "hidden_act", default_activation: str = "silu", **options: Any
) -> MLPSpec:
    """key: where the activation is told. options: those fields of the result that the family settles."""
    activation = read_activation(reader, key, default_activation)
    return MLPSpec(intermediate_size=reader.positive("intermediate_size"), activation=activation, **options)


def read_activation(reader: ConfigReader, key: str = "hidden_act", default: str = "silu") -> str:
    """As `MLPSpec` calls it."""
    activation = reader.get(key, str, default)
    if activation not in _ACTIVATIONS:
        raise ConfigError(f"{reader.where}: {key} is {activation!r}; supported: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[activation]


def num_layers(reader: ConfigReader) -> int:
    return reader.positive("num_hidden_layers", most=_MOST_LAYERS)


def read_layers(
    reader: ConfigReader,
    *,
    mlp: MLPSpec | MoESpec | Sequence[MLPSpec | MoESpec],
    windows: Sequence[int] | None = None,
    ropes: Sequence[int | None] | None = None,
) -> tuple[LayerSpec, ...]:
    """mlp: of all layers, or one a layer. windows, ropes: None: none has a window, all have the first rope."""
    count = num_layers(reader)
    mlps = [mlp] * count if isinstance(mlp, MLPSpec | MoESpec) else mlp
    windows = (FULL_ATTENTION,) * count if windows is None else windows
    ropes = (0,) * count if ropes is None else ropes
    each = zip(mlps, windows, ropes, strict=True)
    return tuple(LayerSpec(mlp=block, window=window, rope=rope) for block, window, rope in each)


def windows_of(kinds: Sequence[str], window: int) -> tuple[int, ...]:
    """The window of each layer: those of the kind sliding_attention have one."""
    return tuple(window if kind == SLIDING else FULL_ATTENTION for kind in kinds)


def read_qwen_windows(reader: ConfigReader) -> tuple[int, ...]:
    """Window of each layer for families where only some layers slide, and only if that is switched on."""
    is_sliding = reader.get("use_sliding_window", bool, False)
    window = read_window(reader, 4096) if is_sliding else FULL_ATTENTION
    first_sliding = reader.get("max_window_layers", int, 28)
    kinds = read_layer_types(reader)
    if kinds is None:
        return tuple(window if index >= first_sliding else FULL_ATTENTION for index in range(num_layers(reader)))
    return windows_of(kinds, window)


def read_layer_types(reader: ConfigReader) -> list[str] | None:
    """`layer_types`, one of full_attention and sliding_attention a layer; None where they are not given."""
    kinds: list[Any] | None = reader.get("layer_types", list, None)
    if kinds is None:
        return None
    count = num_layers(reader)
    unknown = sorted({str(kind) for kind in kinds} - {FULL, SLIDING})
    if unknown or len(kinds) != count:
        raise ConfigError(
            f"{reader.where}: layer_types must name full_attention or sliding_attention for each of {count} "
            f"layers; found {len(kinds)} entries" + (f" with {', '.join(unknown)}" if unknown else "")
        )
    return kinds


def ropes_of(kinds: Sequence[str], ropes: Mapping[str, RopeConfig]) -> tuple[tuple[RopeConfig, ...], tuple[int, ...]]:
    """(the ropes that are used, the one that each layer has), of layers that have the rope of their kind."""
    used = list(dict.fromkeys(kinds))
    return tuple(ropes[kind] for kind in used), tuple(used.index(kind) for kind in kinds)


def read_window(reader: ConfigReader, default: int) -> int:
    """`sliding_window`: null switches it off, absent means the family's default."""
    if "sliding_window" not in reader.values:
        return default
    return FULL_ATTENTION if reader.values["sliding_window"] is None else reader.positive("sliding_window")


def refuse_window(reader: ConfigReader) -> None:
    """For families without windows: a `sliding_window` that would count is refused.

    transformers would cut its cache there but mask nothing in a prompt: its answers depend on where a prompt ends.
    """
    window = reader.get("sliding_window", int, None)
    if window is not None and window < reader.positive("max_position_embeddings"):
        model_type = reader.get("model_type", str)
        raise ConfigError(
            f"{reader.where}: sliding_window is {window}, which {model_type} does not have; set it to null to "
            "attend to all tokens"
        )


def _read_dtype(reader: ConfigReader, default: str) -> str:
    dtype = next((told for key in DTYPE_KEYS if (told := reader.get(key, str, None)) is not None), default)
    dtype = {"half": "float16", "float": "float32"}.get(dtype, dtype)
    if dtype not in _FLOAT_DTYPES:
        raise ConfigError(f"{reader.where}: dtype is {dtype!r}; supported: {', '.join(_FLOAT_DTYPES)}")
    return dtype
