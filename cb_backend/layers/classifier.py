"""From a pooled hidden state to a number for each label: the linear layer of a sequence classifier."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from cb_backend.layers.placement import Placement


class Classifier:
    """Kept and computed in float32: it is small, and its few numbers are what the client gets."""

    def __init__(self, name: str, num_labels: int, hidden_size: int, device: torch.device) -> None:
        """name: of the weight in the checkpoint. There is no bias."""
        self.name = name
        self.weight = torch.empty(num_labels, hidden_size, dtype=torch.float32, device=device)

    def __call__(self, states: Tensor) -> Tensor:
        """[n, hidden_size] -> float32 [n, num_labels]"""
        return torch.nn.functional.linear(states.float(), self.weight)

    def placements(self) -> Iterator[Placement]:
        yield Placement(self.name, self.weight)
