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
        self, configs: Sequence[RopeConfig], rotary_dim: int, max_model_len: int, device: torch.device
    ) -> None:
        self._tables = [RotaryTables(config, rotary_dim, max_model_len, device) for config in configs]
        self.is_static = all(tables.is_static for tables in self._tables)

    def rows(self, positions: Tensor, num_prompt_tokens: Tensor) -> tuple[tuple[Tensor, Tensor], ...]:
        """For each rope the table and the row of each token, as `RotaryTables.rows` gives them."""
        return tuple(tables.rows(positions, num_prompt_tokens) for tables in self._tables)

    def cache_key(self, num_prompt_tokens: int) -> bytes:
        """What the keys of a prompt depend on beside its tokens; requests may share blocks only if this is equal."""
        keys = [tables.cache_key(num_prompt_tokens) for tables in self._tables]
        return b",".join(keys) if any(keys) else b""
