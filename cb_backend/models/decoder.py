"""The decoder-only transformer that all families are: a residual stream through attention and feed-forward blocks.

What a family has of its own (biases, norms, windows, ropes) is in its `ModelSpec`. The model knows neither requests nor
steps nor files.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from cb_backend.layers.classifier import Classifier
from cb_backend.layers.layer_maker import LayerMaker
from cb_backend.layers.placement import Placement
from cb_backend.layers.ropes import Ropes
from cb_backend.layers.step_metadata import LayerCache, StepMetadata
from cb_backend.models.layer_kinds import distinct_layers
from cb_backend.models.spec import CLASSIFIER, ModelSpec


class DecoderLayer:
    """Attention and MLP, each with the junction before it: an addition fused with norms, and these with the product.

    Which norms a junction has is settled when it is made: whatever a family's form, a step runs the same code.
    """

    def __init__(self, spec: ModelSpec, index: int, make: LayerMaker) -> None:
        layer, name, norms = spec.layers[index], spec.layer_name(index), spec.norms
        self.spec = layer
        self.self_attn = make.attention(f"{name}.self_attn", spec.hidden_size, spec.attention, layer)
        self.mlp = make.block(name, spec.hidden_size, layer.mlp)
        self.to_attention = make.junction(
            spec.norm,
            spec.hidden_size,
            leaving=_named(name, norms.before_attention),
            joining=_named(spec.layer_name(index - 1), norms.after_mlp) if index else None,
            scale=spec.residual_scale,
        )
        self.to_mlp = make.junction(
            spec.norm,
            spec.hidden_size,
            leaving=_named(name, norms.before_mlp),
            joining=_named(name, norms.after_attention),
            scale=spec.residual_scale,
        )

    def __call__(
        self, hidden: Tensor, residual: Tensor | None, cache: LayerCache, step: StepMetadata
    ) -> tuple[Tensor, Tensor]:
        """The block's output, not yet added, and the residual stream it belongs to; each [num_tokens, hidden_size].

        The output may be in parts, [num_tokens, num_parts, hidden_size], that are to be added as well.
        """
        if residual is None:  # the first layer
            qkv, residual = self.self_attn.qkv_proj(self.to_attention(hidden), step), hidden
        else:
            qkv, residual = self.self_attn.qkv_proj.after(self.to_attention, hidden, residual, step)
        hidden = self.self_attn(qkv, cache, step)
        return self.mlp.after(self.to_mlp, hidden, residual, step)

    def placements(self) -> Iterator[Placement]:
        for part in (self.self_attn, self.mlp, self.to_attention, self.to_mlp):
            yield from part.placements()


def _named(module: str, norm: str | None) -> str | None:
    return None if norm is None else f"{module}.{norm}"


class DecoderForCausalLM:
    """Token ids in, hidden states out; logits only for the rows that sample."""

    def __init__(self, spec: ModelSpec, make: LayerMaker, *, has_own_head: bool, max_model_len: int) -> None:
        """max_model_len: positions above it never come."""
        self.spec = spec
        self.ops = make.ops
        self.group = make.group
        self.adapters = make.adapters
        self.embed_tokens = make.embedding(
            f"{spec.names.prefix}embed_tokens",
            spec.vocab_size,
            spec.hidden_size,
            scale=spec.embed_scale,
            is_scale_rounded=spec.is_embed_scale_rounded,
        )
        self._windows = tuple(dict.fromkeys(spec.windows))
        self.layers = [DecoderLayer(spec, index, make) for index in range(spec.num_layers)]
        self._order: Sequence[int] = range(spec.num_layers)  # of the layers that run
        self.to_head = make.junction(
            spec.norm,
            spec.hidden_size,
            leaving=f"{spec.names.prefix}norm",
            joining=_named(spec.layer_name(spec.num_layers - 1), spec.norms.after_mlp),
            scale=spec.residual_scale,
            divisor=spec.logits_divisor,
        )
        self._make = make
        self.classifier = None
        if spec.num_labels:
            self.classifier = Classifier(CLASSIFIER, spec.num_labels, spec.hidden_size, make.device)
        self.has_own_head = has_own_head
        if has_own_head:
            size = spec.vocab_size, spec.hidden_size
            self.lm_head = make.own_head(spec.names.head_module, *size, spec.logits_softcap)
        else:
            self.tie_head()
        # NOTE: after the weights, which lie where they would without tables: before them one row of a small model was
        # seen to take 1.4 % longer, by where its weights came to lie.
        self.ropes = Ropes(
            spec.ropes, spec.attention.rotary_dim, max_model_len, make.device, has_identity=spec.has_layers_without_rope
        )

    @property
    def dtype(self) -> torch.dtype:
        """Of hidden states and logits."""
        return self.embed_tokens.weight.dtype

    def tie_head(self) -> None:
        """Give up the head's own weight and use the embedding's."""
        self.has_own_head = False
        self.lm_head = self._make.tied_head(self.embed_tokens, self.spec.logits_softcap)

    def __call__(self, token_ids: Tensor, step: StepMetadata, kv_caches: Sequence[LayerCache]) -> Tensor:
        """[num_tokens] int32 or int64 -> [num_tokens, hidden_size], the final norm applied.

        kv_caches: one a layer; the tokens' keys and values are written at its group's `step.slot_mapping`. `step.ropes`
        are those of `self.ropes.rows`.
        """
        if step.num_decode_rows:
            self._plan_decode(step, kv_caches[0].cells)
        hidden, residual = self.embed_tokens(token_ids), None
        for index in self._order:
            hidden, residual = self.layers[index](hidden, residual, kv_caches[index], step)
        assert residual is not None  # a model has layers
        return self.group.reduce_add_norm(hidden, residual, self.to_head)[0]

    @contextlib.contextmanager
    def abridged(self) -> Iterator[None]:
        """Meanwhile one layer of each kind runs: the same kernels are launched, for results that mean nothing."""
        whole, self._order = self._order, distinct_layers(self.layers)
        try:
            yield
        finally:
            self._order = whole

    def _plan_decode(self, step: StepMetadata, kv_cache: Tensor) -> None:
        """Make the step's plans before any layer: the first layer's attention must find its plan complete."""
        for window in self._windows:
            plan = self.ops.plan_decode(step.decode_seq_lens, kv_cache, window)
            if plan is not None:
                step.decode_plans[window] = plan

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """[num_rows, hidden_size] -> [num_rows, vocab_size] in the model's dtype; in `out` where given.

        Of several devices rank 0 gets them; the others, which must call it as well, get [num_rows, 0].
        """
        return self.lm_head(hidden, out)

    def placements(self) -> Iterator[Placement]:
        """Where every tensor of the checkpoint goes; parts of fused weights are views."""
        yield from self.embed_tokens.placements()
        for layer in self.layers:
            yield from layer.placements()
        yield from self.to_head.placements()
        yield from self.lm_head.placements()
        if self.classifier is not None:
            yield from self.classifier.placements()
