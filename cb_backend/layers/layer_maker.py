"""Builds layers from their specifications: what all of a model's layers have in common is given once, here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from cb_backend.contracts.errors import ConfigError
from cb_backend.layers.adapter_table import AdapterTable
from cb_backend.layers.attention import Attention, AttentionParts, SharedNormAttention, WholeNormAttention, halves_apart
from cb_backend.layers.experts import ExpertLayer, Experts, Held, Inner
from cb_backend.layers.layer_spec import AttentionSpec, LayerSpec, MLPSpec, MoESpec, NormSpec
from cb_backend.layers.linear import Embedding, Linear, ScaledEmbedding
from cb_backend.layers.lm_head import CappedHead, LMHead, OwnHead, SharedHead, TiedHead, rows_of_head
from cb_backend.layers.lora_linear import LoraLinear
from cb_backend.layers.mlp import MLP, Block, GeluMLP
from cb_backend.layers.moe import MoE, MoEParts
from cb_backend.layers.norm import Junction, RMSNorm
from cb_backend.layers.op_signatures import ModelOps
from cb_backend.layers.placement import Placement, shard_of
from cb_backend.layers.projection import Projection, Split
from cb_backend.layers.weight_format import ALIGNED, ModuleFormats
from cb_backend.layers.written_out_linear import WrittenOutLinear
from cb_backend.parallel.group import Group
from cb_backend.parallel.shares import Share, padded_share, share_of_experts, share_of_heads, whole


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMaker:
    """Layers of one model on one device; their tensors are empty. `name`s are those of modules in the checkpoint."""

    ops: ModelOps
    dtype: torch.dtype
    device: torch.device
    group: Group
    format_of: ModuleFormats
    spreads_experts: bool = False  # True: each device has some of them whole, not a part of each
    adapters: AdapterTable | None = None  # what attention and MLPs make room in; None: there are no adapters

    def linear(self, projection: Projection) -> Linear:
        """In the format of its name. Raises `ConfigError` where its parts have different ones."""
        new_linear = self.format_of.of(projection).new_linear
        return new_linear(projection, self.ops, self.group, dtype=self.dtype, device=self.device)

    def adapted(self, projection: Projection) -> Linear:
        """`linear` of a projection that adapters may add to, where there are adapters."""
        linear = self.linear(projection)
        if self.adapters is None:
            return linear
        return LoraLinear(linear, self.adapters.add(projection, self.group.rank, self.group.size))

    def embedding(
        self, name: str, vocab_size: int, hidden_size: int, *, scale: float = 1.0, is_scale_rounded: bool = False
    ) -> Embedding:
        """All of it on every device, with zero rows behind it where the head's shares are padded."""
        num_rows = self.group.size * self._of_head(vocab_size).room if self.group.size > 1 else None
        sizes, dtype, device = (name, vocab_size, hidden_size), self.dtype, self.device
        if scale == 1.0:
            return Embedding(*sizes, dtype=dtype, device=device, num_rows=num_rows)
        return ScaledEmbedding(
            *sizes, scale=scale, is_scale_rounded=is_scale_rounded, dtype=dtype, device=device, num_rows=num_rows
        )

    def tied_head(self, embedding: Embedding, softcap: float = 0.0) -> LMHead:
        """By the embedding's weight."""
        if self.group.size == 1:
            return self._capped(TiedHead(embedding.weight, self.ops), softcap)
        rows = rows_of_head(embedding.weight, self.group.rank, self._of_head(embedding.vocab_size))
        return self._shared(self._capped(TiedHead(rows, self.ops), softcap), embedding.vocab_size)

    def own_head(self, name: str, vocab_size: int, hidden_size: int, softcap: float = 0.0) -> LMHead:
        """In the format of its name."""
        parent, _, part = name.rpartition(".")
        product = self.linear(
            Projection(
                name=parent,
                in_size=hidden_size,
                parts={part: vocab_size},
                split=Split.ROWS,
                shares={part: self._of_head(vocab_size)},
            )
        )
        return self._shared(self._capped(OwnHead(product), softcap), vocab_size)

    def _of_head(self, vocab_size: int) -> Share:
        """This device's rows of the vocabulary."""
        return padded_share(vocab_size, self.group.rank, self.group.size, ALIGNED)

    def _shared(self, head: LMHead, vocab_size: int) -> LMHead:
        if self.group.size == 1:
            return head
        return SharedHead(head, self.group, vocab_size, self._of_head(vocab_size))

    def _capped(self, head: LMHead, softcap: float) -> LMHead:
        return CappedHead(head, self.ops, softcap) if softcap else head

    def norm(self, name: str, spec: NormSpec, size: int, share: Share | None = None) -> RMSNorm:
        """share: of the weight; None: all of it."""
        return RMSNorm(name, spec, size, dtype=self.dtype, device=self.device, share=share)

    def junction(
        self,
        spec: NormSpec,
        size: int,
        *,
        leaving: str | None,
        joining: str | None,
        scale: float = 1.0,
        divisor: float = 1.0,
    ) -> Junction:
        """Between two blocks; the norms are given by their names, None: there is none. `divisor` of what leaves."""
        leaves = None if leaving is None else self.norm(leaving, replace(spec, divisor=divisor), size)
        joins = None if joining is None else self.norm(joining, spec, size)
        return Junction(self.ops, spec, leaving=leaves, joining=joins, scale=scale)

    def attention(self, name: str, hidden_size: int, spec: AttentionSpec, layer: LayerSpec) -> Attention:
        """With this device's heads. Raises `ConfigError` where they cannot be shared out."""
        rank, size, head_dim = self.group.rank, self.group.size, spec.head_dim
        heads, kv_heads = share_of_heads(spec.num_heads, spec.num_kv_heads, rank, size)
        of_q, of_kv = heads.times(head_dim), kv_heads.times(head_dim)
        q_size, kv_size = spec.num_heads * head_dim, spec.num_kv_heads * head_dim
        qkv_proj = Projection(
            name=name,
            in_size=hidden_size,
            parts={"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size},
            has_bias=spec.has_qkv_bias,
            split=Split.ROWS,
            shares={"q_proj": of_q, "k_proj": of_kv, "v_proj": of_kv},
            transforms=dict.fromkeys(("q_proj", "k_proj"), halves_apart(spec)) if spec.is_interleaved else {},
            stored_as="qkv_proj" if spec.is_qkv_fused else None,
        )
        o_proj = Projection(
            name=name, in_size=q_size, parts={"o_proj": hidden_size}, has_bias=spec.has_o_bias, split=Split.COLUMNS,
            columns=of_q,
        )  # fmt: skip
        norms: dict[str, RMSNorm] = {}
        if spec.qk_norm is not None:
            sizes = ((q_size, of_q), (kv_size, of_kv)) if spec.is_qk_norm_whole else 2 * ((head_dim, None),)
            for part, (its_size, share) in zip(("q_norm", "k_norm"), sizes, strict=True):
                norms[part] = self.norm(f"{name}.{part}", spec.qk_norm, its_size, share)
        sinks = None
        if spec.has_sinks:
            values = torch.empty(heads.size, dtype=self.dtype, device=self.device)
            sinks = Placement(f"{name}.sinks", values, shard_of(heads, spec.num_heads))
        parts = AttentionParts(qkv_proj=self.adapted(qkv_proj), o_proj=self.adapted(o_proj), sinks=sinks, **norms)
        own = replace(spec, num_heads=heads.size, num_kv_heads=kv_heads.size)
        if not spec.is_qk_norm_whole:
            return Attention(name, own, layer, parts, self.ops)
        if size == 1:
            return WholeNormAttention(name, own, layer, parts, self.ops)
        return SharedNormAttention(name, own, layer, parts, self.ops, self.group)

    def block(self, layer_name: str, hidden_size: int, spec: MLPSpec | MoESpec) -> Block:
        """A layer's feed-forward block of either kind."""
        if isinstance(spec, MoESpec):
            return self.moe(f"{layer_name}.{spec.names.module}", hidden_size, spec)
        return self.mlp(f"{layer_name}.mlp", hidden_size, spec)

    def mlp(self, name: str, hidden_size: int, spec: MLPSpec) -> MLP:
        size, has_bias = spec.intermediate_size, spec.has_bias
        first = ("gate_up_proj",) if spec.is_gate_up_fused else ("gate_proj", "up_proj")
        share = self.inner_share(size, [f"{name}.{part}" for part in (*first, "down_proj")])
        gate_up_proj = Projection(
            name=name,
            in_size=hidden_size,
            parts={"gate_proj": size, "up_proj": size},
            has_bias=has_bias,
            split=Split.ROWS,
            shares={"gate_proj": share, "up_proj": share},
            is_gated=spec.activation == "silu",
            stored_as="gate_up_proj" if spec.is_gate_up_fused else None,
        )
        down_proj = Projection(
            name=name, in_size=size, parts={"down_proj": hidden_size}, has_bias=has_bias, split=Split.COLUMNS,
            columns=share,
        )  # fmt: skip
        products = self.adapted(gate_up_proj), self.adapted(down_proj)
        return GeluMLP(*products) if spec.activation == "gelu_tanh" else MLP(*products)

    def inner_share(self, size: int, modules: Iterable[str]) -> Share:
        """This device's features between gate, up and down, which are these modules: in steps that their formats can be
        cut into, with padding where they do not come out."""
        granule = max(self.format_of(module).granule for module in modules)
        return padded_share(size, self.group.rank, self.group.size, granule)

    def moe(self, name: str, hidden_size: int, spec: MoESpec) -> MoE:
        """Every device has its part of each expert, or its experts, and the router whole. Raises `ConfigError` where
        the devices do not divide experts that are to be spread."""
        names, experts = spec.names, self._experts(name, hidden_size, spec)
        rows = {names.router: spec.num_experts} | ({names.shared_gate: 1} if spec.has_shared_gate else {})
        # Plain whatever the format of the rest: most checkpoints leave it so without saying it, others pack it.
        projection = Projection(name=name, in_size=hidden_size, parts=rows, has_bias=spec.has_router_bias)
        readers = {module: self.format_of.reader_of_packed(module) for module in map(projection.module, rows)}
        router = WrittenOutLinear(
            {module: reader for module, reader in readers.items() if reader is not None}, projection,
            self.ops, self.group, dtype=torch.float32 if spec.is_routed_in_float32 else self.dtype, device=self.device,
        )  # fmt: skip
        score_bias = None
        if spec.has_score_bias:
            bias = torch.empty(spec.num_experts, dtype=torch.float32, device=self.device)
            score_bias = Placement(f"{name}.{names.router}.e_score_correction_bias", bias)
        parts = MoEParts(
            router=router,
            experts=experts,
            shared=None if spec.shared is None else self.mlp(f"{name}.{names.shared}", hidden_size, spec.shared),
            score_bias=score_bias,
        )
        return MoE(spec, parts, self.ops, self.group)

    def _experts(self, name: str, hidden_size: int, spec: MoESpec) -> Experts:
        """In the format of their names. Raises `ConfigError` where gate, up and down have different ones."""
        names = spec.names
        first = ".".join(part for part in (name, names.experts, "0" if spec.storage == "apart" else "") if part)
        formats = {part: self.format_of(f"{first}.{part}") for part in (names.gate, names.up, names.down)}
        if len({found.name for found in formats.values()}) > 1:
            told = ", ".join(f"{part} is {found.name}" for part, found in formats.items())
            raise ConfigError(f"{first}: {told}: supported is one format for all of an expert")
        own, size = whole(spec.num_experts), spec.intermediate_size
        if self.spreads_experts:
            own, share = share_of_experts(spec.num_experts, self.group.rank, self.group.size), whole(size)
        else:
            share = self.inner_share(size, [f"{first}.{part}" for part in formats])
        layer = ExpertLayer(name, hidden_size, spec, Held(own, Inner(share, size)))
        its_format = formats[names.gate]
        return its_format.new_experts(layer, self.ops, self.group, dtype=self.dtype, device=self.device)
