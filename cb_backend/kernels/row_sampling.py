"""How rows sample: the fields of `TokenRules` that are marked `PerRow`, as tensors of rows or slots.

The sampler, the slot state and the gather of a step's rows take them in the order of `ROW_PARAMETERS`. This module does
not know the sampler.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Annotated, get_args, get_origin, get_type_hints

import numpy as np
import torch
from torch import Tensor

from cb_backend.contracts.token_rules import PerRow, TokenRules


@dataclass(frozen=True, slots=True)
class Row:
    """What a row-wise parameter is on the device, and where its value comes from."""

    dtype: torch.dtype
    format: str  # NumPy's name of the same
    neutral: float
    read: Callable[[TokenRules], float]


def _row_parameters() -> dict[str, Row]:
    found = {}
    for name, hint in get_type_hints(TokenRules, include_extras=True).items():
        marks = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
        for mark in (each for each in marks if isinstance(each, PerRow)):
            dtype = torch.from_numpy(np.empty(0, mark.format)).dtype
            found[name] = Row(dtype, mark.format, mark.neutral, mark.read or attrgetter(name))
    return found


ROW_PARAMETERS: dict[str, Row] = _row_parameters()  # by name, in order
_INDEX = {name: index for index, name in enumerate(ROW_PARAMETERS)}


class RowSampling(tuple[Tensor, ...]):
    """How some rows, or all slots, sample: tensors [num_rows] or [num_slots] in the order of `ROW_PARAMETERS`."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Tensor:
        if name not in _INDEX:
            raise AttributeError(f"there is no row-wise parameter {name!r}; there are {', '.join(_INDEX)}")
        return self[_INDEX[name]]


def neutral_rows(num_rows: int, device: torch.device) -> RowSampling:
    """Rows that sample greedily, without filters."""
    return RowSampling(
        torch.full((num_rows,), row.neutral, dtype=row.dtype, device=device) for row in ROW_PARAMETERS.values()
    )
