"""Book the sampled tokens into the slot state on the device, so that the next step can start without the host.

Knows slots and counters, not stop conditions.
"""

from __future__ import annotations

from torch import Tensor


def append_tokens_torch(token_ids: Tensor, slots: Tensor, last_token: Tensor, num_tokens: Tensor) -> None:
    """`last_token[slots[i]] = token_ids[i]` and `num_tokens[slots[i]] += 1`, in place.

    token_ids, slots [num_rows] int32; last_token, num_tokens [num_slots] int32. A row whose slot is negative
    (padding) changes nothing. Slots must differ from each other.
    """
    live = slots >= 0
    index = slots[live].long()
    last_token[index] = token_ids[live].to(last_token.dtype)
    num_tokens[index] += 1
