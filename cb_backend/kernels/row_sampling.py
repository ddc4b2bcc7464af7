"""How rows sample: the one list of the parameters that the sampler reads for each row.

The slot state, the array by which requests join, the gather of a step's rows and their padding follow from the list.
A new parameter is a line here, and an argument of `sample` and its twin. This module does not know the sampler.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Annotated, NamedTuple, get_type_hints

import torch
from torch import Tensor

from cb_backend.contracts.token_rules import TokenRules


@dataclass(frozen=True, slots=True)
class Row:
    """What a row-wise parameter is on the device, and where its value comes from."""

    dtype: torch.dtype  # of 32 or 64 bits
    neutral: float  # changes nothing: for rows of padding, and for slots that nobody has had yet
    read: Callable[[TokenRules], float]


def _temperature(params: TokenRules) -> float:
    return 0.0 if params.is_greedy else params.temperature


def _seed_bits(params: TokenRules) -> int:
    """The unsigned seed as the signed number of the same bits."""
    return params.seed - 2**64 if params.seed >= 2**63 else params.seed


class RowSampling(NamedTuple):
    """How some rows, or all slots, sample. Tensors [num_rows] or [num_slots], in the order of `sample`'s arguments."""

    temperature: Annotated[Tensor, Row(torch.float32, 0.0, _temperature)]  # 0 = greedy
    top_k: Annotated[Tensor, Row(torch.int32, 0, lambda params: max(params.top_k, 0))]  # 0 = off
    top_p: Annotated[Tensor, Row(torch.float32, 1.0, attrgetter("top_p"))]  # 1 = off
    min_p: Annotated[Tensor, Row(torch.float32, 0.0, attrgetter("min_p"))]  # 0 = off
    seeds: Annotated[Tensor, Row(torch.int64, 0, _seed_bits)]


# By name, in order.
ROW_PARAMETERS: dict[str, Row] = {
    name: hint.__metadata__[0] for name, hint in get_type_hints(RowSampling, include_extras=True).items()
}


def neutral_rows(num_rows: int, device: torch.device) -> RowSampling:
    """Rows that sample greedily, without filters."""
    return RowSampling(
        *(torch.full((num_rows,), row.neutral, dtype=row.dtype, device=device) for row in ROW_PARAMETERS.values())
    )
