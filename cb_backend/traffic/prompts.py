"""Prompts as token ids, of planned lengths, with shared prefixes where the plan shares them. The same for one seed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cb_backend.traffic.traces import MOONCAKE_BLOCK_TOKENS
from cb_backend.traffic.workload import PlannedRequest

_PREFIX, _UNIQUE = 1, 2  # keep the random streams of shared and unique tokens apart


def prompts_of(
    requests: Sequence[PlannedRequest], vocab_size: int, seed: int, block_tokens: int = MOONCAKE_BLOCK_TOKENS
) -> list[NDArray[np.int32]]:
    """One array [num_prompt_tokens] a request: the blocks of its prefix ids, then tokens of its own.

    Ids are drawn from 0 to `vocab_size` - 1. Blocks of equal prefix ids are equal; a prompt may end inside one.
    """
    blocks: dict[int, NDArray[np.int32]] = {}
    prompts = []
    for request in requests:
        left = request.num_prompt_tokens
        parts = []
        for prefix_id in request.prefix_ids:
            if left <= 0:
                break
            if prefix_id not in blocks:
                rng = np.random.default_rng([seed, _PREFIX, prefix_id])
                blocks[prefix_id] = rng.integers(0, vocab_size, block_tokens, dtype=np.int32)
            parts.append(blocks[prefix_id][:left])
            left -= block_tokens
        if left > 0:
            rng = np.random.default_rng([seed, _UNIQUE, request.request_id])
            parts.append(rng.integers(0, vocab_size, left, dtype=np.int32))
        prompts.append(np.concatenate(parts))
    return prompts
