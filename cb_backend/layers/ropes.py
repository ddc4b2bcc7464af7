"""All ropes of a model: a layer names the one it uses, and finds its angles in the step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cb_backend.layers.rope_config import RopeConfig
from cb_backend.layers.rotary import RotaryTables


class Ropes:
    """`is_static`: `rows` always returns the same tables, so their addresses may be recorded in a CUDA graph."""

    def __init__(
        self,
        configs: Sequence[RopeConfig],
        rotary_dim: int,
        max_model_len: int,
        device: torch.device,
        *,
        has_identity: bool = False,
    ) -> None:
        """has_identity: after the others comes one that turns nothing, for layers that are not told positions."""
        if device.type == "meta":  # an outline; the first operation there would import a second's worth of torch
            device = torch.device("cpu")
        # cos 1 and sin 0 for every position: one row, repeated without memory
        row = torch.cat((torch.ones(rotary_dim // 2), torch.zeros(rotary_dim // 2))).to(device)
        self._identity = row.expand(max_model_len, rotary_dim) if has_identity else None
        self._tables = [RotaryTables(config, rotary_dim, max_model_len, device) for config in configs]
        self.is_static = all(tables.is_static for tables in self._tables)

    def rows(self, positions: Tensor, num_prompt_tokens: Tensor) -> tuple[tuple[Tensor, Tensor], ...]:
        """For each rope the table and the row of each token, as `RotaryTables.rows` gives them."""
        rows = [tables.rows(positions, num_prompt_tokens) for tables in self._tables]
        if self._identity is not None:
            rows.append((self._identity, positions.to(torch.int32)))
        return tuple(rows)

    def cache_key(self, num_prompt_tokens: int) -> bytes:
        """What the keys of a prompt depend on beside its tokens; requests may share blocks only if this is equal."""
        keys = [tables.cache_key(num_prompt_tokens) for tables in self._tables]
        return b",".join(keys) if any(keys) else b""
