"""What a model is, as plain data: the layers, in order, and what they share.

A family's `read_spec` makes one of a checkpoint's `config.json`; the decoder builds it. This module does not know
tensors, files or devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from cb_backend.layers.layer_spec import AttentionSpec, LayerSpec, NormSpec
from cb_backend.layers.rope_config import RopeConfig
from cb_backend.layers.weight_format import ModuleFormats


class Names(NamedTuple):
    """How a checkpoint calls the model's tensors."""

    prefix: str = "model."  # of all but the head's
    head: str = "lm_head.weight"

    @property
    def head_module(self) -> str:
        return self.head.removesuffix(".weight")


CLASSIFIER = "score.weight"  # of a sequence classifier, beside the decoder


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockNorms:
    """Which norms stand around a layer's two blocks, by their names in the checkpoint; None: there is none."""

    before_attention: str | None
    after_attention: str | None
    before_mlp: str | None
    after_mlp: str | None


PRE_NORMS = BlockNorms(
    before_attention="input_layernorm", after_attention=None, before_mlp="post_attention_layernorm", after_mlp=None
)
POST_NORMS = BlockNorms(
    before_attention=None,
    after_attention="post_attention_layernorm",
    before_mlp=None,
    after_mlp="post_feedforward_layernorm",
)
SANDWICH_NORMS = BlockNorms(
    before_attention="input_layernorm",
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One decoder-only model: sizes, options, and what generation needs to know."""

    model_type: str
    vocab_size: int
    hidden_size: int
    attention: AttentionSpec
    norm: NormSpec
    ropes: tuple[RopeConfig, ...]
    layers: tuple[LayerSpec, ...]
    max_position_embeddings: int
    is_length_stretched: bool = False  # what the ropes stretch is counted in max_position_embeddings
    tie_word_embeddings: bool
    norms: BlockNorms = PRE_NORMS
    embed_scale: float = 1.0
    is_embed_scale_rounded: bool = False  # to the embedding's type, before it multiplies
    residual_scale: float = 1.0  # of what a block adds to the residual stream
    logits_divisor: float = 1.0
    logits_softcap: float = 0.0  # 0: none
    names: Names = Names()  # noqa: RUF009 - it is frozen
    other_names: tuple[Names, ...] = ()  # that a checkpoint may have instead
    ignored: str | None = None  # regular expression: names of the checkpoint's tensors that are other parts than this
    dtype: str = "float32"  # of the checkpoint
    quantization: str | None = None  # of the checkpoint's matrices: fp8, a method's name, or None
    formats: ModuleFormats | None = None  # of modules, where they are not all plain, or all fp8
    eos_token_ids: tuple[int, ...] = ()
    has_head: bool = True  # False: there is none, or nobody wants it
    generates: bool = True  # False: no token is ever sampled, so steps end with hidden states
    num_labels: int = 0  # of a sequence classifier

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_heads(self) -> int:
        return self.attention.num_heads

    @property
    def num_kv_heads(self) -> int:
        return self.attention.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.attention.head_dim

    @property
    def has_layers_without_rope(self) -> bool:
        return any(layer.rope is None for layer in self.layers)

    def layer_name(self, index: int) -> str:
        """Of the module in the checkpoint."""
        return f"{self.names.prefix}layers.{index}"

    @property
    def windows(self) -> tuple[int, ...]:
        """[num_layers] newest tokens a query sees, its own included; 0 = all."""
        return tuple(layer.window for layer in self.layers)

    @property
    def max_context_len(self) -> int:
        """Longest context the checkpoint is meant for: `max_position_embeddings`, stretched by the rope scaling.

        For linear, dynamic and yarn files may give the length before the stretch; the others give the one after it.
        """
        if self.is_length_stretched:
            return self.max_position_embeddings
        return max(_stretched(rope, self.max_position_embeddings) for rope in self.ropes)


def _stretched(rope: RopeConfig, max_position_embeddings: int) -> int:
    if rope.rope_type in ("linear", "dynamic"):
        return int(max_position_embeddings * rope.factor)
    if rope.rope_type == "yarn":
        return max(max_position_embeddings, int(rope.original_max_position_embeddings * rope.factor))
    return max_position_embeddings
