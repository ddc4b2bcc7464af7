"""The model that a GGUF file's metadata and the names of its tensors describe, in the words of `config.json`.

Every key of the architecture is either read here or known to have no effect; any other one is refused by name, because
a setting that is silently dropped gives wrong answers. This module converts no tensor.
"""

from __future__ import annotations

from typing import Any

from cb_backend.contracts.errors import ConfigError
from cb_backend.models.config_reader import ConfigReader
from cb_backend.models.gguf.rope_scaling import read_rope_parameters
from cb_backend.models.gguf.source import GgufSource, listed
from cb_backend.models.gguf.vocabulary import Vocabulary

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
EMBEDDING = "token_embd.weight"
HEAD = "output.weight"

_WINDOW = "attention.sliding_window"
_READ = {
    "context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count",
    "attention.head_count_kv", "attention.key_length", "attention.value_length", _WINDOW,
    "attention.layer_norm_rms_epsilon", "rope.dimension_count", "rope.freq_base", "rope.scale_linear",
    *(f"rope.scaling.{key}" for key in (
        "type", "factor", "original_context_length", "attn_factor", "yarn_attn_factor", "yarn_ext_factor",
        "yarn_log_multiplier", "yarn_beta_fast", "yarn_beta_slow", "alpha",
    )),
}  # fmt: skip
# The rows of the embedding say the vocabulary's size, more surely than the key does.
_WITHOUT_EFFECT = {"vocab_size", "rope.scaling.finetuned", "tensor_data_layout", "attention.causal"}
_SAMPLING = {
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "penalty_repeat": "repetition_penalty",
}  # fmt: skip


def read_vocab_size(source: GgufSource) -> int:
    """Rows of the embedding, padding included. Raises `ConfigError` for another architecture or a lack of it."""
    if source.architecture not in ARCHITECTURES:
        raise ConfigError(
            f"{source.name} holds the architecture {source.architecture!r}; supported: {', '.join(ARCHITECTURES)}"
        )
    if EMBEDDING not in source.tensors:
        raise ConfigError(f"{source.name} lacks the tensor {EMBEDDING}; it is cut off or one part of a model")
    return source.tensors[EMBEDDING].shape[0]


def read_model_settings(source: GgufSource, vocabulary: Vocabulary) -> dict[str, Any]:
    """The object of `config.json`. Raises `ConfigError` for another architecture, a missing key or an unsupported
    setting, each by its name in the file.
    """
    prefix = f"{source.architecture}."
    vocab_size = read_vocab_size(source)
    reader = ConfigReader(_of_all_layers(source, prefix), source.name)
    _refuse_unknown(source, prefix)
    num_heads = reader.positive(prefix + "attention.head_count")
    head_dim = _read_head_dim(reader, prefix, num_heads)
    model_type, options = _read_family(source, reader, prefix)
    return {
        "architectures": ["MistralForCausalLM" if model_type == "mistral" else ARCHITECTURES[model_type]],
        "model_type": model_type,
        "hidden_act": "silu",
        "hidden_size": reader.positive(prefix + "embedding_length"),
        "intermediate_size": reader.positive(prefix + "feed_forward_length"),
        "num_hidden_layers": reader.positive(prefix + "block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": reader.positive(prefix + "attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": reader.positive(prefix + "context_length"),
        "rms_norm_eps": reader.positive_float(prefix + "attention.layer_norm_rms_epsilon"),
        "rope_parameters": read_rope_parameters(source, reader, head_dim),
        "tie_word_embeddings": HEAD not in source.tensors,
        "vocab_size": vocab_size,
        # A GPU runs it in bfloat16 unless told otherwise: the quantised values hold fewer bits than that.
        "dtype": "bfloat16",
        **vocabulary.ids(),
        **options,
    }


def read_generation_settings(source: GgufSource, vocabulary: Vocabulary) -> dict[str, Any]:
    """The object of `generation_config.json`: the ends of an answer, and the sampling that the file proposes."""
    proposed = {
        ours: source.metadata[key]
        for theirs, ours in _SAMPLING.items()
        if (key := f"general.sampling.{theirs}") in source.metadata
    }
    if proposed:
        proposed["do_sample"] = proposed.get("temperature", 1.0) > 0
    return {**vocabulary.ids(), **proposed}


def _of_all_layers(source: GgufSource, prefix: str) -> dict[str, Any]:
    """The metadata, lists of one value a layer as that value. Raises `ConfigError` where layers differ."""
    values = dict(source.metadata)
    for key, value in source.metadata.items():
        if key.startswith(prefix) and isinstance(value, list):
            if len(set(value)) != 1:
                raise ConfigError(f"{source.name}: {key} differs between layers, which is not supported: {value[:8]}")
            values[key] = value[0]
    return values


def _refuse_unknown(source: GgufSource, prefix: str) -> None:
    known = {prefix + key for key in _READ | _WITHOUT_EFFECT}
    for key, value in source.metadata.items():
        if key.startswith(prefix) and key not in known and value not in (0, "", []):  # 0.0 and False are 0
            hint = "; mixtures of experts are not supported" if ".expert_" in key else ""
            raise ConfigError(f"{source.name} sets {key} to {value!r}, which this backend does not know{hint}")
    if source.metadata.get(prefix + "attention.causal", True) is not True:
        raise ConfigError(f"{source.name}: {prefix}attention.causal is false; this is no model that generates text")


def _read_head_dim(reader: ConfigReader, prefix: str, num_heads: int) -> int:
    rotary_dim = reader.get(prefix + "rope.dimension_count", int, None)
    usual = rotary_dim or reader.positive(prefix + "embedding_length") // num_heads
    head_dim = reader.positive(prefix + "attention.key_length", usual)
    for key, value in (("attention.value_length", head_dim), ("rope.dimension_count", head_dim)):
        if reader.get(prefix + key, int, value) != head_dim:
            raise ConfigError(
                f"{reader.where}: {prefix}{key} is {reader.get(prefix + key, int)}, but heads have {head_dim} "
                "numbers; keys, values and rotary embeddings must be of one size"
            )
    return head_dim


def _read_family(source: GgufSource, reader: ConfigReader, prefix: str) -> tuple[str, dict[str, Any]]:
    """The model_type and its options. Mistral has no name of its own in GGUF: it is a llama with a window."""
    window = reader.get(prefix + _WINDOW, int, 0)
    if source.architecture != "llama" and window:
        raise ConfigError(f"{source.name}: {prefix}{_WINDOW} is {window}, but not of which layers; not supported")
    if source.architecture == "qwen2":
        return "qwen2", {"use_sliding_window": False}
    attention_bias = _has_biases(source, "attn_q", "attn_k", "attn_v", "attn_output")
    if source.architecture == "qwen3":
        return "qwen3", {"use_sliding_window": False, "attention_bias": attention_bias}
    mlp_bias = _has_biases(source, "ffn_gate", "ffn_up", "ffn_down")
    if not window:
        return "llama", {"attention_bias": attention_bias, "mlp_bias": mlp_bias}
    if attention_bias or mlp_bias:
        raise ConfigError(f"{source.name}: {prefix}{_WINDOW} is {window}; a window beside biases is not supported")
    return "mistral", {"sliding_window": window}


def _has_biases(source: GgufSource, *modules: str) -> bool:
    """Whether the first layer has these biases: all of them, or the file is refused."""
    names = [f"blk.0.{module}.bias" for module in modules]
    present = [name for name in names if name in source.tensors]
    if present and len(present) < len(names):
        raise ConfigError(
            f"{source.name} has {listed(present)} but not {listed(n for n in names if n not in present)}; biases of "
            "some of these matrices alone are not supported"
        )
    return bool(present)
