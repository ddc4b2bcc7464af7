"""How each launcher is called on small CPU tensors of a case's shapes, so that `compiling` records what it launches.

Those of products, of experts and of adapters are with their cases.
"""

from __future__ import annotations

from typing import Any

import torch

from cb_backend.engine.runner.device_state import new_slot_state
from cb_backend.engine.runner.step_buffers import make_buffers, padding
from cb_backend.engine.step_shapes import StepShape
from cb_backend.kernels.row_sampling import neutral_rows
from cb_backend.kernels.slot_state import NUM_JOINED_WORDS, SlotState
from tests.kernels.expert_cases import EXPERT_LAUNCHES
from tests.kernels.lora_cases import LORA_LAUNCHES
from tests.kernels.product_launches import PRODUCT_LAUNCHES


def _attention(
    num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: str, kv_dtype: str | None = None
) -> dict[str, Any]:
    kind, kv_kind = getattr(torch, dtype), getattr(torch, kv_dtype or dtype)
    return {
        "q": torch.zeros(2, num_heads, head_dim, dtype=kind),
        "kv_cache": torch.zeros(2, 2, num_kv_heads, block_size, head_dim, dtype=kv_kind),
        "block_tables": torch.zeros(2, 16, dtype=torch.int32),
        "slots": torch.zeros(2, dtype=torch.int32),
        "seq_lens": torch.ones(2, dtype=torch.int32),
        "scale": 0.1,
    }


def _decode(module: Any, window: int = 0, softcap: float = 0.0, **shapes: Any) -> None:
    arguments = _attention(**shapes)
    module.decode_attention(**arguments, window=window, softcap=softcap, plans=_plans(module, arguments, window))


def _plans(module: Any, arguments: dict[str, Any], window: int) -> dict[int, Any]:
    """As in a step: the plan is there before the first layer."""
    return {window: module.plan_decode(arguments["seq_lens"], arguments["kv_cache"], window)}


def _prefill(module: Any, window: int = 0, softcap: float = 0.0, **shapes: Any) -> None:
    starts = torch.tensor([0, 1, 2], dtype=torch.int32)
    module.prefill_attention(
        **_attention(**shapes), window=window, softcap=softcap, query_start_loc=starts, max_query_len=1
    )


def _rms_norm(
    module: Any,
    hidden_size: int,
    op: str = "add_rms_norm",
    weight_dtype: str = "bfloat16",
    has_post: bool = False,
    num_parts: int = 1,
    **options: Any,
) -> None:
    x, weight = torch.zeros(2, hidden_size, dtype=torch.bfloat16), torch.zeros(hidden_size)
    weight = weight.to(getattr(torch, weight_dtype))
    parts = x if num_parts == 1 else torch.zeros(2, num_parts, hidden_size, dtype=torch.bfloat16)
    getattr(module, op)(parts, x, weight, 1e-6, post_weight=weight if has_post else None, **options)


def _reduce_norm(module: Any, hidden_size: int, num_ranks: int) -> None:
    table = torch.zeros(module.MAX_RANKS, dtype=torch.int64)
    step, failed = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    peers = module.Peers(torch.stack((table, table)), table, table, step, failed, 0, num_ranks)
    x, weight = (torch.zeros(size, dtype=torch.bfloat16) for size in ((2, hidden_size), (hidden_size,)))
    module.reduce_add_norm(peers, 0, x, weight, 1e-6)


def _silu_mul(module: Any, intermediate_size: int, op: str = "silu_mul") -> None:
    getattr(module, op)(torch.zeros(2, 2 * intermediate_size, dtype=torch.bfloat16))


def _cap_logits(module: Any, vocab_size: int) -> None:
    module.cap_logits(torch.zeros(2, vocab_size, dtype=torch.bfloat16), 30.0)


def _qkv_post(
    module: Any,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    has_norm: bool,
    kv_dtype: str = "bfloat16",
    num_tokens: int = 2,
    norm_dtype: str = "bfloat16",
    has_q_scale: bool = False,
    **options: Any,
) -> None:
    kv_cache = torch.zeros(2, 2, num_kv_heads, 16, head_dim, dtype=getattr(torch, kv_dtype))
    tokens = torch.zeros(num_tokens, dtype=torch.int32)
    norm = torch.zeros(head_dim, dtype=getattr(torch, norm_dtype)) if has_norm else None
    module.qkv_post(
        torch.zeros(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype=torch.bfloat16),
        torch.zeros(4, head_dim + has_q_scale), tokens, tokens, kv_cache,
        num_heads, num_kv_heads, head_dim, norm, norm, **options,
    )  # fmt: skip


def _sample(module: Any, vocab_size: int) -> None:
    logits = torch.zeros(2, vocab_size, dtype=torch.bfloat16)
    module.sample(logits, neutral_rows(2, logits.device), torch.zeros(2, dtype=torch.int64))


def _top_logprobs(module: Any, vocab_size: int) -> None:
    rows, logits = torch.zeros(2, dtype=torch.int64), torch.zeros(2, vocab_size, dtype=torch.bfloat16)
    module.top_logprobs(logits, rows, rows.int(), 5)


def _apply_marks(module: Any, vocab_size: int) -> None:
    rows, marks = torch.zeros(2, dtype=torch.int64), torch.zeros(2, vocab_size, dtype=torch.int32)
    module.apply_marks(marks.float(), rows, marks, rows, torch.zeros(2, 3))


def _apply_token_bitmask(module: Any, vocab_size: int) -> None:
    bitmask = torch.zeros(2, -(-vocab_size // 32), dtype=torch.int32)
    module.apply_token_bitmask(torch.zeros(2, vocab_size), bitmask, torch.zeros(2, dtype=torch.int64))


def _slots(max_blocks: int = 256) -> SlotState:
    return new_slot_state(2, max_blocks, torch.device("cpu"))


def _join_slots(module: Any) -> None:
    state = _slots()
    module.join_slots(torch.zeros(2, NUM_JOINED_WORDS + state.stop_ids.shape[1], dtype=torch.int32), state)


def _apply_deltas(module: Any, max_blocks: int) -> None:
    module.apply_deltas(_slots(max_blocks).block_tables, torch.zeros(16, 3, dtype=torch.int32))


def _prepare_rows(module: Any, max_blocks: int, block_size: int) -> None:
    buffers = make_buffers(StepShape(2), padding(StepShape(2), 2), torch.device("cpu"))
    module.prepare_rows(buffers.slots, 2, _slots(max_blocks), block_size, buffers.rows)


def _commit_tokens(module: Any) -> None:
    state, (ints, *result) = _slots(), torch.zeros(3, 2, dtype=torch.int32)
    module.commit_tokens(ints, ints, ints.bool(), ints.long(), state.min_positions, state, torch.stack(result))


def _mask_stop_ids(module: Any, vocab_size: int) -> None:
    state, slots, logits = _slots(), torch.zeros(2).int(), torch.zeros(2, vocab_size, dtype=torch.bfloat16)
    module.mask_stop_ids(logits, slots, slots.long(), state.min_positions, state.stop_ids)


LAUNCHES = {
    **PRODUCT_LAUNCHES,
    **EXPERT_LAUNCHES,
    **LORA_LAUNCHES,
    "decode_attention": _decode,
    "prefill_attention": _prefill,
    "rms_norm": _rms_norm,
    "reduce_norm": _reduce_norm,
    "silu_mul": _silu_mul,
    "cap_logits": _cap_logits,
    "qkv_post": _qkv_post,
    "sample": _sample,
    "top_logprobs": _top_logprobs,
    "apply_marks": _apply_marks,
    "apply_token_bitmask": _apply_token_bitmask,
    "join_slots": _join_slots,
    "apply_deltas": _apply_deltas,
    "prepare_rows": _prepare_rows,
    "commit_tokens": _commit_tokens,
    "mask_stop_ids": _mask_stop_ids,
}
