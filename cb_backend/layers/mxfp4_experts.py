"""gpt-oss's experts as they are published: mxfp4, one tensor of elements and one of scales for all experts.

Rows of gate and up lie in turn there, as the packed products have them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from cb_backend.contracts.errors import ConfigError
from cb_backend.kernels.packed import pack, packed_bytes
from cb_backend.layers.experts import Inner
from cb_backend.layers.packed_experts import MXFP4_GROUP, PackedMixture, Stack, bytes_a_group_of_experts
from cb_backend.layers.placement import Placement
from cb_backend.layers.stored_matrix import StoredReader
from cb_backend.layers.stored_shares import columns_of, rows_of


class Mxfp4Mixture(PackedMixture):
    """The experts of a layer; the reader makes stored elements of an expert's `blocks` and `scales`."""

    def _placements_of_stacks(self) -> Iterator[Placement]:
        names, size, hidden = self.spec.names, self.spec.intermediate_size, self.hidden_size
        for stack, part, rows, columns in (
            (self.gate_up, names.gate, 2 * size, hidden),
            (self.down, names.down, hidden, size),
        ):
            if columns % MXFP4_GROUP:
                raise ConfigError(
                    f"{self.name}.{part}: mxfp4 needs input features in groups of {MXFP4_GROUP}, not {columns}"
                )
            count, room = self.held.experts.size, self.held.inner.share.room
            size_here = (2 * room, hidden) if stack.is_gated else (hidden, room)
            a_group = bytes_a_group_of_experts(self.reader)
            num_bytes = count * packed_bytes(*size_here, self.reader.kind, MXFP4_GROUP, a_group)
            parts = _Parts(stack, self.reader, self._device, self.held.inner, num_bytes)
            shape = (count, rows, columns // MXFP4_GROUP)
            yield Placement(f"{self.name}.{part}_blocks", _Part(parts, "blocks", (*shape, 16)))
            yield Placement(f"{self.name}.{part}_scales", _Part(parts, "scales", shape))


class _Parts:
    """Both tensors of a product, until they have come."""

    def __init__(self, stack: Stack, reader: StoredReader, device: torch.device, inner: Inner, num_bytes: int) -> None:
        self.stack, self.reader, self.device = stack, reader, device
        self.inner = inner
        self.num_bytes = num_bytes  # of both on the device
        self.come: dict[str, Tensor] = {}

    def take(self, kind: str, tensor: Tensor) -> None:
        self.come[kind] = tensor
        if len(self.come) < 2:
            return
        blocks, scales, share = self.come.pop("blocks"), self.come.pop("scales"), self.inner.share
        for expert in range(blocks.shape[0]):
            stored = self.reader.read({"blocks": blocks[expert], "scales": scales[expert]})
            # Rows of gate and up lie in turn: two for a feature.
            stored = rows_of(stored, [share.times(2)]) if self.stack.is_gated else columns_of(stored, share)
            self.stack.put(expert, pack(stored.values, stored.scales, stored.kind, stored.group))


class _Part:
    """Where one of them goes."""

    def __init__(self, parts: _Parts, kind: str, shape: tuple[int, ...]) -> None:
        self.shape = torch.Size(shape)
        self.device = parts.device
        # All of the product counts at its elements, as of other packed weights.
        self.nbytes = parts.num_bytes if kind == "blocks" else 0
        self.num_weights = 2 * self.shape.numel() if kind == "blocks" else 0
        self.format_name = parts.reader.name
        self._parts, self._kind = parts, kind

    def numel(self) -> int:
        return self.shape.numel()

    def copy_(self, source: Tensor) -> None:
        self._parts.take(self._kind, source.to(self.device))

    def normal_(self, mean: float, std: float, *, generator: torch.Generator | None = None) -> None:
        """Elements of all kinds; scales that make numbers of about `std` of them."""
        if self._kind == "blocks":
            values = torch.randint(0, 256, self.shape, generator=generator, device=self.device, dtype=torch.uint8)
        else:
            exponent = 127 + round(torch.tensor(std / 2.9).log2().item())
            values = torch.full(self.shape, exponent, device=self.device, dtype=torch.uint8)
        self._parts.take(self._kind, values)
