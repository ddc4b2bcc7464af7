"""What a card can do at best: the least time a step, a prompt or a whole workload can take.

A step reads every weight once and the keys and values of every context token once, and multiplies each token with each
weight; it cannot be faster than the memory or the arithmetic allows. Of experts it reads those that some token goes to,
as many as even routing would hit; of a context, what a layer's window lets it see. Pure arithmetic: knows no device
and no engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cb_backend.kv_cache.layout import ALL_TOKENS, bytes_per_token


@dataclass(frozen=True, slots=True)
class CardLimits:
    """Measured on the card, in the same run as the figures they are held against."""

    bandwidth: float  # bytes/s, read + write, of a device copy
    flops: float  # FLOP/s of a large matrix product in the model's dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShape:
    """The experts of those layers that have some."""

    num_layers: int
    num_experts: int
    top_k: int
    intermediate_size: int  # of an expert
    shared_size: int = 0  # intermediate size of what every token goes through beside them
    weight_bytes: float | None = None  # a parameter of an expert; None: as of the other layers

    def distinct(self, num_tokens: int) -> float:
        """Experts of a layer that some of the tokens go to, where each goes to any with the same chance."""
        return self.num_experts * (1.0 - (1.0 - self.top_k / self.num_experts) ** num_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes that decide how many bytes and FLOP a step takes."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int  # of layers without experts
    vocab_size: int
    experts: ExpertShape | None = None
    weight_bytes: float = 2.0  # a parameter of the layers
    head_bytes: float | None = None  # a parameter of the head; None: as weight_bytes
    layer_speed: float = 1.0  # of the layers' products, beside those that `CardLimits.flops` was measured with
    kv_element_bytes: float = 2.0
    windows: tuple[int, ...] = ()  # newest tokens that each layer sees, ALL_TOKENS: all; none: all see all

    def tokens_read(self, contexts: NDArray[np.int64]) -> float:
        """Tokens of these contexts whose keys and values are read, by the mean of the layers."""
        if not any(self.windows):
            return float(contexts.sum())
        total = 0
        for window, count in Counter(self.windows).items():
            total += count * int((contexts if window == ALL_TOKENS else np.minimum(contexts, window)).sum())
        return total / self.num_layers

    def attention_pairs(self, earlier: NDArray[np.int64], chunks: NDArray[np.int64]) -> float:
        """(query, key) pairs of prompt chunks behind so many earlier tokens, by the mean of the layers."""
        ends = earlier + chunks
        return sum(
            count * float((_pairs_up_to(ends, window) - _pairs_up_to(earlier, window)).sum())
            for window, count in Counter(self.windows or (ALL_TOKENS,)).items()
        ) / len(self.windows or (ALL_TOKENS,))

    @property
    def layer_params(self) -> int:
        """Parameters of all layers' matrices (norms and biases are too small to count)."""
        return self._common_params + (self._expert_params * self.experts.num_experts if self.experts else 0)

    @property
    def active_params(self) -> int:
        """Those of them that a token is multiplied with."""
        return self._common_params + (self._expert_params * self.experts.top_k if self.experts else 0)

    @property
    def _common_params(self) -> int:
        """All but the experts': attention, dense blocks, routers and what every token shares."""
        qkv = self.hidden_size * (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        output = self.num_heads * self.head_dim * self.hidden_size
        mlp = 3 * self.hidden_size * self.intermediate_size
        if self.experts is None:
            return self.num_layers * (qkv + output + mlp)
        beside = self.hidden_size * (self.experts.num_experts + 3 * self.experts.shared_size)
        sparse = self.experts.num_layers
        return self.num_layers * (qkv + output) + (self.num_layers - sparse) * mlp + sparse * beside

    @property
    def _expert_params(self) -> int:
        """Of one expert in every layer that has them."""
        if self.experts is None:
            return 0
        return self.experts.num_layers * 3 * self.hidden_size * self.experts.intermediate_size

    @property
    def head_params(self) -> int:
        """Parameters of the output head. The input embedding is only gathered from, which costs nothing."""
        return self.vocab_size * self.hidden_size

    @property
    def bytes_per_step(self) -> float:
        """Weight bytes that a step of many tokens reads: all."""
        return self.bytes_read(1 << 30)

    def bytes_read(self, num_tokens: int) -> float:
        """Weight bytes that a step of so many tokens reads."""
        head_bytes = self.weight_bytes if self.head_bytes is None else self.head_bytes
        num_bytes = self.weight_bytes * self._common_params + head_bytes * self.head_params
        if self.experts is None:
            return num_bytes
        expert_bytes = self.weight_bytes if self.experts.weight_bytes is None else self.experts.weight_bytes
        return num_bytes + expert_bytes * self._expert_params * self.experts.distinct(num_tokens)

    @property
    def kv_bytes_per_token(self) -> float:
        return bytes_per_token(self.num_layers, self.num_kv_heads, self.head_dim, self.kv_element_bytes)

    @property
    def flops_per_pair(self) -> int:
        """Attention FLOP for one query token and one key token: both products, all layers and heads."""
        return 4 * self.num_layers * self.num_heads * self.head_dim


def _pairs_up_to(tokens: NDArray[np.int64], window: int) -> NDArray[np.float64]:
    """Of each prompt's first `tokens` with what they see of each other."""
    seen = tokens if window == ALL_TOKENS else np.minimum(tokens, window)
    return np.asarray(seen * (tokens - seen / 2.0), np.float64)


def step_seconds(
    shape: ModelShape,
    card: CardLimits,
    *,
    num_tokens: int,
    num_sampling_rows: int,
    num_read_tokens: float,
    num_attention_pairs: float = 0.0,
) -> float:
    """The least time for one step of any mix of decode rows and prompt chunks.

    `num_read_tokens` is the number of tokens whose keys and values are read from the cache (contexts of the decode
    rows, earlier chunks of the prompts), see `ModelShape.tokens_read`. `num_attention_pairs` counts the (query, key)
    pairs of prompt chunks; those of decode rows are bound by memory, not by arithmetic.
    """
    layer_flops = 2 * num_tokens * shape.active_params / shape.layer_speed
    linear_flops = layer_flops + 2 * num_sampling_rows * shape.head_params
    flops = linear_flops + shape.flops_per_pair * num_attention_pairs
    weights = max(shape.bytes_read(num_tokens) / card.bandwidth, flops / card.flops)
    logits = 4 * num_sampling_rows * shape.vocab_size  # bytes: written once, read once, two each
    return weights + (num_read_tokens * shape.kv_bytes_per_token + logits) / card.bandwidth


def decode_seconds(shape: ModelShape, card: CardLimits, num_rows: int, num_context_tokens: int) -> float:
    """T_dec: a step of `num_rows` decode rows whose contexts sum to `num_context_tokens`, all about as long."""
    num_read = num_rows * shape.tokens_read(np.array([num_context_tokens / num_rows])) if num_rows else 0.0
    return step_seconds(shape, card, num_tokens=num_rows, num_sampling_rows=num_rows, num_read_tokens=num_read)


def prompt_flops(shape: ModelShape, num_tokens: int) -> float:
    """FLOP of one causal prompt, logits for its last token only; those of faster products count for less."""
    layer_flops = 2 * shape.active_params * num_tokens / shape.layer_speed
    pairs = shape.attention_pairs(np.array([0]), np.array([num_tokens]))
    return layer_flops + 2 * shape.head_params + shape.flops_per_pair * pairs


def prefill_seconds(shape: ModelShape, card: CardLimits, prompt_lens: Sequence[int]) -> float:
    """T_pre of prompts computed together: bound by arithmetic, but never below one read of the weights.

    Of experts only one token's are counted: those of a prompt have more of them in common than even routing would say.
    """
    flops = sum(prompt_flops(shape, length) for length in prompt_lens)
    return max(shape.bytes_read(1) / card.bandwidth, flops / card.flops)


@dataclass(frozen=True, slots=True)
class IdealSchedule:
    """What a perfect scheduler on a perfect engine would need. Times in seconds."""

    prefill_seconds: float
    decode_seconds: float
    num_steps: int  # decode steps

    @property
    def seconds(self) -> float:
        return self.prefill_seconds + self.decode_seconds


def ideal_schedule(
    shape: ModelShape,
    card: CardLimits,
    prompt_lens: Sequence[int],
    output_lens: Sequence[int],
    max_cached_tokens: int | None = None,
    num_shared_prompt_tokens: Sequence[int] | None = None,
) -> IdealSchedule:
    """All requests there at the start, everything that fits runs at once, in the order given.

    A prompt yields the first output token, each decode step one more.
    `max_cached_tokens` is the KV cache's size in tokens; a request joins when its whole length fits beside the others'.
    `num_shared_prompt_tokens` are the leading prompt tokens of each request that a prefix cache saves.
    """
    shared = [0] * len(prompt_lens) if num_shared_prompt_tokens is None else num_shared_prompt_tokens
    flops = sum(
        prompt_flops(shape, length) - (prompt_flops(shape, cached) - 2 * shape.head_params if cached else 0)
        for length, cached in zip(prompt_lens, shared, strict=True)
    )
    prefill = max(shape.bytes_read(int(sum(prompt_lens))) / card.bandwidth, flops / card.flops)
    # Rows of the decode steps: context at the first of them (its own token included), number of steps.
    prompts, outputs = np.asarray(prompt_lens, np.int64) + 1, np.asarray(output_lens, np.int64) - 1
    prompts, outputs = prompts[outputs > 0], outputs[outputs > 0]
    capacity = max_cached_tokens if max_cached_tokens is not None else int((prompts + outputs).sum())
    decode, num_steps, joined = 0.0, 0, 0
    contexts, left = np.zeros(0, np.int64), np.zeros(0, np.int64)  # of the running rows
    while joined < len(prompts) or len(left):
        joined, contexts, left = _join(prompts, outputs, capacity, joined, contexts, left)
        decode += step_seconds(
            shape,
            card,
            num_tokens=len(left),
            num_sampling_rows=len(left),
            num_read_tokens=shape.tokens_read(contexts),
        )
        num_steps += 1
        contexts, left = contexts + 1, left - 1
        is_running = left > 0
        contexts, left = contexts[is_running], left[is_running]
    return IdealSchedule(prefill, decode, num_steps)


def _join(
    prompts: NDArray[np.int64],
    outputs: NDArray[np.int64],
    capacity: int,
    joined: int,
    contexts: NDArray[np.int64],
    left: NDArray[np.int64],
) -> tuple[int, NDArray[np.int64], NDArray[np.int64]]:
    """Let the next requests in while they fit; at least one runs, so that a too small capacity cannot hang."""
    used = int((contexts + left).sum())
    first = joined
    while joined < len(prompts):
        length = int(prompts[joined] + outputs[joined])
        if used + length > capacity and (len(left) or joined > first):
            break
        used += length
        joined += 1
    fresh = slice(first, joined)
    return joined, np.concatenate((contexts, prompts[fresh])), np.concatenate((left, outputs[fresh]))
