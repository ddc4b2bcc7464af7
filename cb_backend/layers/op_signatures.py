"""What can be asked of the ops: of those that layers call, and of those that the step around the model calls.

Shapes, types and what is computed are told by each op's twin in `cb_backend/kernels`; a test holds these signatures to
them.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from cb_backend.kernels.expert_plan import ExpertPlan
from cb_backend.kernels.fp8 import Fp8Rows
from cb_backend.kernels.grouped_packed import PackedExperts
from cb_backend.kernels.lora_plan import AdapterPlan
from cb_backend.kernels.packed import PackedWeight
from cb_backend.kernels.route import Routing
from cb_backend.kernels.row_sampling import RowSampling
from cb_backend.kernels.slot_state import SlotState
from cb_backend.kernels.step_rows import StepRows


class ModelOps(Protocol):
    """The ops of the layers."""

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None, rounds_first: bool = True
    ) -> Tensor: ...
    def add_rms_norm(
        self,
        x: Tensor,
        residual: Tensor,
        weight: Tensor | None,
        eps: float,
        out: tuple[Tensor, Tensor] | None = None,
        post_weight: Tensor | None = None,
        x_scale: float = 1.0,
        rounds_first: bool = True,
    ) -> tuple[Tensor, Tensor]: ...
    def gelu_mul(self, gate_up: Tensor, out: Tensor | None = None) -> Tensor: ...
    def silu_mul(self, gate_up: Tensor, out: Tensor | None = None) -> Tensor: ...
    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor: ...
    def linear_silu_mul(self, x: Tensor, weight: Tensor) -> Tensor: ...
    def add_norm_linear(
        self, x: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]: ...

    # The same with fp8 weights
    def add_rms_norm_fp8(
        self,
        x: Tensor,
        residual: Tensor,
        weight: Tensor | None,
        eps: float,
        post_weight: Tensor | None = None,
        x_scale: float = 1.0,
        rounds_first: bool = True,
    ) -> tuple[Fp8Rows, Tensor]: ...
    def quantize_rows(self, x: Tensor) -> Fp8Rows: ...
    def linear_fp8(self, x: Fp8Rows, weight: Tensor, weight_scales: Tensor, bias: Tensor | None = None) -> Tensor: ...
    def linear_silu_mul_fp8(self, x: Fp8Rows, weight: Tensor, weight_scales: Tensor) -> Tensor: ...

    # And with weights of 4 and 8 bits
    def linear_packed(
        self, x: Tensor, weight: PackedWeight, bias: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor: ...
    def linear_silu_mul_packed(self, x: Tensor, weight: PackedWeight) -> Tensor: ...

    # And of experts, each token with its own
    def route_experts(
        self,
        logits: Tensor,
        slot_mapping: Tensor,
        parts: Tensor,
        routing: Routing,
        score_bias: Tensor | None = None,
        bits: int = 16,
    ) -> tuple[Tensor, ExpertPlan]: ...
    def gate_rows(self, x: Tensor, gate: Tensor | None, out: Tensor) -> Tensor: ...
    def grouped_gate_up(
        self,
        x: Tensor,
        weight: Tensor,
        plan: ExpertPlan,
        top_k: int,
        activation: str = "silu",
        bias: Tensor | None = None,
    ) -> Tensor: ...
    def grouped_down(
        self,
        x: Tensor,
        weight: Tensor,
        plan: ExpertPlan,
        row_weights: Tensor,
        out: Tensor,
        bias: Tensor | None = None,
    ) -> Tensor: ...

    # What adapters add to a product
    def lora_shrink(self, x: Tensor, a: Tensor, plan: AdapterPlan) -> Tensor: ...
    def linear_shrink(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None, a: Tensor, plan: AdapterPlan
    ) -> tuple[Tensor, Tensor]: ...
    def lora_expand(
        self, y: Tensor, shrunk: Tensor, b: Tensor, scales: Tensor, slices: tuple[int, ...], plan: AdapterPlan
    ) -> None: ...
    def lora_expand_gated(
        self,
        gate_up: Tensor,
        shrunk: Tensor,
        b: Tensor,
        scales: Tensor,
        slices: tuple[int, ...],
        plan: AdapterPlan,
        is_gelu: bool = False,
    ) -> Tensor: ...

    def qkv_post(
        self,
        qkv: Tensor,
        cos_sin: Tensor,
        cos_sin_rows: Tensor,
        slot_mapping: Tensor,
        kv_cache: Tensor,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 1e-6,
        out: Tensor | None = None,
        key_scale: float = 1.0,
        value_scale: float = 1.0,
        rounds_first: bool = True,
    ) -> Tensor: ...
    def cap_logits(self, logits: Tensor, cap: float) -> Tensor: ...
    def plan_decode(self, seq_lens: Tensor, kv_cache: Tensor, window: int = 0) -> Tensor | None: ...
    def decode_attention(
        self,
        q: Tensor,
        kv_cache: Tensor,
        block_tables: Tensor,
        slots: Tensor,
        seq_lens: Tensor,
        scale: float,
        window: int = 0,
        out: Tensor | None = None,
        plans: dict[int, Tensor] | None = None,
        value_scale: float = 1.0,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor: ...
    def prefill_attention(
        self,
        q: Tensor,
        kv_cache: Tensor,
        block_tables: Tensor,
        slots: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        scale: float,
        window: int = 0,
        *,
        max_query_len: int,
        out: Tensor | None = None,
        value_scale: float = 1.0,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor: ...

    def grouped_gate_up_packed(
        self,
        x: Tensor,
        weight: PackedExperts,
        plan: ExpertPlan,
        top_k: int,
        activation: str = "silu",
        bias: Tensor | None = None,
    ) -> Tensor: ...
    def grouped_down_packed(
        self,
        x: Tensor,
        weight: PackedExperts,
        plan: ExpertPlan,
        row_weights: Tensor,
        out: Tensor,
        bias: Tensor | None = None,
    ) -> Tensor: ...


class StepOps(Protocol):
    """The ops of the step around the model, and of the rows that ask for more."""

    def sample(
        self,
        logits: Tensor,
        sampling: RowSampling,
        positions: Tensor,
        has_filters: bool = True,
        out: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]: ...
    def apply_deltas(self, block_tables: Tensor, deltas: Tensor) -> None: ...
    def join_slots(self, joined: Tensor, state: SlotState) -> None: ...
    def prepare_rows(
        self, slots: Tensor, num_decode: int, state: SlotState, block_size: int, out: StepRows
    ) -> None: ...
    def plan_adapters(
        self,
        slots: Tensor,
        num_decode: int,
        prompt_slots: Tensor,
        query_start_loc: Tensor,
        num_prefill: int,
        adapter_of_slot: Tensor,
        max_adapters: int,
    ) -> AdapterPlan: ...
    def commit_tokens(
        self,
        slots: Tensor,
        sampled: Tensor,
        is_failed: Tensor,
        sample_positions: Tensor,
        min_positions: Tensor,
        state: SlotState,
        result: Tensor,
    ) -> None: ...
    def mask_stop_ids(
        self, logits: Tensor, slots: Tensor, sample_positions: Tensor, min_positions: Tensor, stop_ids: Tensor
    ) -> None: ...
    def apply_marks(
        self, logits: Tensor, rows: Tensor, marks: Tensor, mark_rows: Tensor, penalties: Tensor
    ) -> None: ...
    def apply_token_bitmask(self, logits: Tensor, bitmask: Tensor, rows: Tensor) -> None: ...
    def top_logprobs(self, logits: Tensor, rows: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor]: ...


class Ops(ModelOps, StepOps, Protocol):
    """All of one backend."""

    backend: str  # triton | torch
