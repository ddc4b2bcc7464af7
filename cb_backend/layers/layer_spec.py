"""What a layer of a decoder is, as plain data: sizes and options, no tensors.

`models.spec` puts layers together to a model; `layer_maker` builds what stands here.
"""

from __future__ import annotations

from dataclasses import dataclass

FULL_ATTENTION = 0  # a window: the layer sees every earlier token


@dataclass(frozen=True, slots=True, kw_only=True)
class NormSpec:
    """An RMSNorm."""

    eps: float
    rounds_first: bool = True  # the normed vector to its type before the weight multiplies it; else only after it
    plus_one: bool = False  # the checkpoint holds weights less 1
    divisor: float = 1.0  # of the weights

    @property
    def is_folded(self) -> bool:
        """Whether the weight is not what the checkpoint holds."""
        return self.plus_one or self.divisor != 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Grouped-query attention, the same in every layer of a model but for windows and ropes."""

    num_heads: int
    num_kv_heads: int
    head_dim: int  # need not be hidden_size / num_heads
    rotary_dim: int  # the dimensions of a head that are turned, the first ones
    scale: float  # of the scores
    is_interleaved: bool = False  # the checkpoint turns each dimension with its neighbour, not one half with the other
    softcap: float = 0.0  # of the scaled scores; 0: none
    has_qkv_bias: bool = False
    has_o_bias: bool = False
    is_qkv_fused: bool = False  # in the checkpoint: one matrix qkv_proj
    qk_norm: NormSpec | None = None  # of q and k before RoPE
    is_qk_norm_whole: bool = False  # over all heads at once; else over each
    has_sinks: bool = False  # each head has a score of its own beside those of the keys


@dataclass(frozen=True, slots=True, kw_only=True)
class MLPSpec:
    """The gated feed-forward block."""

    intermediate_size: int
    activation: str = "silu"  # silu | gelu_tanh
    has_bias: bool = False
    is_gate_up_fused: bool = False  # in the checkpoint: one matrix gate_up_proj


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """How a checkpoint calls the tensors of a layer's experts: parts of the names of modules."""

    module: str = "mlp"  # in the layer
    router: str = "gate"  # in that module
    experts: str = "experts"  # in that module; each expert is a number in it where they are apart
    gate: str = "gate_proj"  # of gate and up where they are one
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "shared_expert"  # in the first module
    shared_gate: str = "shared_expert_gate"


@dataclass(frozen=True, slots=True, kw_only=True)
class MoESpec:
    """A mixture of experts: gated feed-forward blocks, of which each token goes through the best few."""

    num_experts: int
    top_k: int
    intermediate_size: int  # of each expert
    activation: str = "silu"  # of the experts
    scoring: str = "softmax"  # softmax | softmax_of_top_k | sigmoid
    renormalise: bool = False  # the chosen ones' weights to a sum of 1
    scale: float = 1.0  # of the weights
    num_groups: int = 1  # of neighbouring experts
    top_groups: int = 1  # whose experts may be chosen
    is_routed_in_float32: bool = False  # the router's product, whatever the rest is in
    has_router_bias: bool = False
    has_score_bias: bool = False  # of scores when experts are chosen, not when they are weighed
    has_bias: bool = False  # of the experts
    shared: MLPSpec | None = None  # which every token goes through beside its experts
    has_shared_gate: bool = False  # its output is multiplied by the sigmoid of a product of its own
    storage: str = "apart"  # in the checkpoint: apart, an expert each | stacked | interleaved: see `PlainExperts`
    names: ExpertNames = ExpertNames()


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """What one layer has for itself."""

    mlp: MLPSpec | MoESpec
    window: int = FULL_ATTENTION  # newest tokens a query sees, its own included
    rope: int | None = 0  # which of the model's ropes; None: positions are not told
