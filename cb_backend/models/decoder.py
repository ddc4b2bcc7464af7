"""The decoder-only transformer that the supported families share: a residual stream through attention and MLP blocks.

What a family adds (biases, per-head norms, windows, rope scaling) is in its `ModelConfig`; its file says how it is
read. The model knows neither requests nor steps nor files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from cb_backend.layers.attention import Attention
from cb_backend.layers.attention_metadata import AttentionMetadata
from cb_backend.layers.linear import Embedding, Fillable, Linear, LMHead
from cb_backend.layers.mlp import MLP
from cb_backend.layers.norm import RMSNorm
from cb_backend.layers.ops import Ops
from cb_backend.models.model_config import ModelConfig


class DecoderLayer:
    """norm, attention, add; norm, MLP, add. The additions are fused into the norm that follows, it into the product."""

    def __init__(
        self,
        config: ModelConfig,
        window: int,
        ops: Ops,
        *,
        dtype: torch.dtype,
        device: torch.device,
        linear_class: type[Linear] = Linear,
    ) -> None:
        self.self_attn = Attention(
            config.hidden_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            ops,
            window=window,
            has_qkv_bias=config.has_qkv_bias,
            has_o_bias=config.has_o_bias,
            qk_norm_eps=config.rms_norm_eps if config.has_qk_norm else None,
            dtype=dtype,
            device=device,
            linear_class=linear_class,
        )
        self.mlp = MLP(
            config.hidden_size,
            config.intermediate_size,
            ops,
            has_bias=config.has_mlp_bias,
            dtype=dtype,
            device=device,
            linear_class=linear_class,
        )
        self.input_layernorm, self.post_attention_layernorm = (
            RMSNorm(config.hidden_size, config.rms_norm_eps, ops, dtype=dtype, device=device) for _ in range(2)
        )

    def __call__(
        self, hidden: Tensor, residual: Tensor | None, metadata: AttentionMetadata, kv_cache: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The block's output, not yet added, and the residual stream it belongs to; each [num_tokens, hidden_size]."""
        if residual is None:  # the first layer
            qkv, residual = self.self_attn.qkv_proj(self.input_layernorm(hidden)), hidden
        else:
            qkv, residual = self.self_attn.qkv_proj.after(self.input_layernorm, hidden, residual)
        hidden = self.self_attn(qkv, metadata, kv_cache)
        return self.mlp.after(self.post_attention_layernorm, hidden, residual)

    def checkpoint_tensors(self, prefix: str) -> Iterator[tuple[str, Fillable]]:
        yield from self.self_attn.checkpoint_tensors(f"{prefix}.self_attn")
        yield from self.mlp.checkpoint_tensors(f"{prefix}.mlp")
        yield from self.input_layernorm.checkpoint_tensors(f"{prefix}.input_layernorm")
        yield from self.post_attention_layernorm.checkpoint_tensors(f"{prefix}.post_attention_layernorm")


class DecoderForCausalLM:
    """Token ids in, hidden states out; logits only for the rows that sample."""

    def __init__(
        self,
        config: ModelConfig,
        ops: Ops,
        *,
        has_own_head: bool,
        dtype: torch.dtype,
        device: torch.device,
        linear_class: type[Linear] = Linear,
    ) -> None:
        self.config = config
        self.ops = ops
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self.layers = [
            DecoderLayer(config, window, ops, dtype=dtype, device=device, linear_class=linear_class)
            for window in config.windows
        ]
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, ops, dtype=dtype, device=device)
        embedding = self.embed_tokens.weight
        self.lm_head = LMHead(torch.empty_like(embedding) if has_own_head else embedding, ops)

    @property
    def dtype(self) -> torch.dtype:
        """Of hidden states and logits."""
        return self.embed_tokens.weight.dtype

    @property
    def has_own_head(self) -> bool:
        return self.lm_head.weight is not self.embed_tokens.weight

    def tie_head(self) -> None:
        """Give up the head's own weight and use the embedding's."""
        self.lm_head.weight = self.embed_tokens.weight

    def __call__(self, token_ids: Tensor, metadata: AttentionMetadata, kv_caches: Sequence[Tensor]) -> Tensor:
        """[num_tokens] int32 or int64 -> [num_tokens, hidden_size], the final norm applied.

        kv_caches: one [num_blocks, 2, num_kv_heads, block_size, head_dim] a layer; the tokens' keys and values are
        written at `metadata.slot_mapping`.
        """
        if metadata.num_decode_rows:
            self._plan_decode(metadata, kv_caches[0])
        hidden, residual = self.embed_tokens(token_ids), None
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            hidden, residual = layer(hidden, residual, metadata, kv_cache)
        assert residual is not None  # a model has layers
        return self.norm.add(hidden, residual)[0]

    def _plan_decode(self, metadata: AttentionMetadata, kv_cache: Tensor) -> None:
        """Make the step's plans before any layer: the first layer's attention must find its plan complete."""
        for window in dict.fromkeys(self.config.windows):
            plan = self.ops.plan_decode(metadata.decode_seq_lens, kv_cache, window)
            if plan is not None:
                metadata.decode_plans[window] = plan

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """[num_rows, hidden_size] -> [num_rows, vocab_size] in the model's dtype; in `out` where given."""
        return self.lm_head(hidden, out)

    def checkpoint_tensors(self) -> Iterator[tuple[str, Fillable]]:
        """Every tensor of the model under its checkpoint name; parts of fused weights are views."""
        yield "model.embed_tokens.weight", self.embed_tokens.weight
        for index, layer in enumerate(self.layers):
            yield from layer.checkpoint_tensors(f"model.layers.{index}")
        yield from self.norm.checkpoint_tensors("model.norm")
        if self.has_own_head:
            yield "lm_head.weight", self.lm_head.weight
