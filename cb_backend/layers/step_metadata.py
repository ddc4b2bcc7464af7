"""Where the tokens of one step stand: what layers need to know beside the activations.

Built once a step by whoever runs the model, and the last argument of every layer's call; no layer keeps it. Decode
tokens (one a row) come first in the token dimension, prefill tokens after them, so one step is one pass over all tokens
with two attention calls.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from cb_backend.kernels.lora_plan import AdapterPlan


class LayerCache(NamedTuple):
    """Where a layer's keys and values are."""

    cells: Tensor  # [num_blocks, 2, num_kv_heads, block_size, head_dim]
    group: int = 0  # whose block tables lead to them


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetadata:
    """All tensors lie on the model's device. Either part may be empty (zero-length tensors)."""

    # For each rope of the model (`DecoderForCausalLM.rope_rows`), which angles turn each token:
    # a table [num_rows_of_the_table, rotary_dim] float32, first half cos, second half sin; its rows [num_tokens] int32
    ropes: tuple[tuple[Tensor, Tensor], ...]
    # Of each group of layers that has block tables of its own:
    slot_mapping: tuple[Tensor, ...]  # [num_tokens] int32 block_id * block_size + offset; block 0 for padding
    block_tables: tuple[Tensor, ...]  # [num_slots, max_blocks] int32 block ids in token order
    # Decode rows: tokens [0, num_decode_rows)
    num_decode_rows: int
    decode_slots: Tensor  # [num_decode_rows] int32 row of block_tables
    decode_seq_lens: Tensor  # [num_decode_rows] int32 tokens to attend to, the row's own included
    decode_plans: dict[int, Tensor] = field(default_factory=dict)  # the decode kernel's work lists, by window
    # Prefill rows: tokens [num_decode_rows, num_tokens)
    prefill_slots: Tensor  # [num_prefill_rows] int32
    prefill_query_start_loc: Tensor  # [num_prefill_rows + 1] int32, counted from the first prefill token
    prefill_seq_lens: Tensor  # [num_prefill_rows] int32 tokens of the row in the cache after this step
    max_query_len: int  # longest prefill row of this step; 0: there is none
    adapters: AdapterPlan | None = None  # which tokens go through which; None: the step has no adapters
