"""A projection whose weight has 4 or 8 bits an element: what checkpoints store, packed once while it is loaded.

A module of such a checkpoint has several tensors; when the last of them has come, a reader makes stored elements of
them, and when the last part of a fused projection has, the whole is packed for the device. Inputs stay in 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cb_backend.contracts.errors import ConfigError
from cb_backend.kernels.lora_plan import AdapterPlan
from cb_backend.kernels.packed import KINDS, StoredWeight, narrowed, pack, packed_bytes
from cb_backend.layers.linear import Linear
from cb_backend.layers.norm import Junction
from cb_backend.layers.op_signatures import ModelOps
from cb_backend.layers.packed_pieces import Piece, PlainPiece, go_together, joined, ordered
from cb_backend.layers.placement import Placement
from cb_backend.layers.projection import Part, Projection
from cb_backend.layers.step_metadata import StepMetadata
from cb_backend.layers.stored_matrix import StoredMatrix, StoredReader
from cb_backend.layers.stored_shares import columns_of, goes_with, rows_of, with_rows, written_out
from cb_backend.parallel.group import Group
from cb_backend.parallel.shares import Share

_SPREAD = {"int4": 4.6, "int8": 74.0, "fp8": 1.0, "fp4": 2.9}  # standard deviation of random elements


def bytes_a_group(reader: StoredReader, scale_bytes: int | None = None) -> int:
    """What a group has on the device beside its elements: a scale and a shift of 16 bits (of fp8: 32), or of so many
    bytes, and a zero point of 8 bits.
    """
    each = (4 if reader.kind == "fp8" else 2) if scale_bytes is None else scale_bytes
    return each * (1 + reader.has_shifts) + reader.has_zeros


@dataclass
class _Module:
    """One of the checkpoint's modules."""

    rows: slice  # of the projection, with those that pad a share
    shares: tuple[Share, ...]  # of the module's rows: one a part that it stores
    transform: Callable[[Tensor], Tensor] | None
    matrix: StoredMatrix


class PackedLinear(Linear):
    """`Linear` with packed weights: one piece, or several where the parts' scales or orders do not go together."""

    def __init__(
        self,
        projection: Projection,
        ops: ModelOps,
        group: Group,
        reader: StoredReader,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.reader = reader
        self.device = device
        self.dtype = dtype
        self.pieces: list[Piece | PlainPiece] = []
        self._stored: dict[int, StoredWeight] = {}  # first row of a module -> what it stores, until all have come
        super().__init__(projection, ops, group, dtype=dtype, device=device)
        self._modules = self._find_modules()

    def _new_weight(self, size: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
        self.size = size
        return torch.empty(0, dtype=dtype, device=device)  # the pieces hold it

    @property
    def bytes_a_group(self) -> int:
        """See `bytes_a_group`."""
        return bytes_a_group(self.reader)

    def __call__(self, x: Tensor, step: StepMetadata) -> Tensor:
        products = [self._product(x, piece) for piece in self.pieces]
        return products[0] if len(products) == 1 else torch.cat(products, dim=1)

    def with_shrunk(self, x: Tensor, a: Tensor, step: StepMetadata, plan: AdapterPlan) -> tuple[Tensor, Tensor]:
        return self._shrunk_first(x, a, step, plan)

    def into(self, x: Tensor, out: Tensor | None) -> Tensor:
        (piece,) = self.pieces
        return piece.product(self.ops, x, self.bias, out)

    def after(self, junction: Junction, x: Tensor, residual: Tensor, step: StepMetadata) -> tuple[Tensor, Tensor]:
        normed, total = self.group.reduce_add_norm(x, residual, junction)
        return self(normed, step), total

    def gated(self, x: Tensor, step: StepMetadata) -> Tensor:
        first = self.pieces[0]
        if isinstance(first, Piece) and first.weight.is_gated:
            return self.ops.linear_silu_mul_packed(ordered(x, first.order), first.weight)
        return self.ops.silu_mul(self(x, step))

    def _product(self, x: Tensor, piece: Piece | PlainPiece) -> Tensor:
        return piece.product(self.ops, x, None if self.bias is None else self.bias[piece.rows])

    # ---- loading ---------------------------------------------------------------------------------------------------

    def _find_modules(self) -> dict[str, _Module]:
        parts = list(self.projection.places(self.group.rank, self.group.size))
        if self.projection.stored_as is not None:  # one module has the rows of all parts, in their order
            if any(part.transform is not None for part in parts):
                raise ConfigError(f"{parts[0].name}: {self.reader.name} weights of this family are not supported")
            matrix = StoredMatrix(self.reader, sum(self.projection.parts.values()), self.projection.in_size)
            shares = tuple(part.share for part in parts)
            return {parts[0].name: _Module(slice(0, self.size[0]), shares, None, matrix)}
        sizes = self.projection.parts.values()
        return {
            part.name: _Module(
                part.room, (part.share,), part.transform, StoredMatrix(self.reader, size, self.projection.in_size)
            )
            for part, size in zip(parts, sizes, strict=True)
        }

    def _placements_of(self, part: Part) -> Iterator[Placement]:
        module = self._modules[part.name]
        if part.rows.start != module.rows.start:
            return  # of a module that another part has listed
        for suffix in module.matrix.tensors:
            yield Placement(f"{part.name}.{suffix}", ModuleTensor(self, module, suffix))

    def take(self, module: _Module, suffix: str, tensor: Tensor) -> None:
        """A tensor of the checkpoint. Raises `ValueError` for a matrix that cannot be used, and `ConfigError`."""
        stored = module.matrix.take(suffix, tensor)
        if stored is None:
            return
        stored = rows_of(stored, module.shares)
        if module.transform is not None:
            stored = with_rows(stored, module.transform)
        columns = self.projection.columns_of(self.group.rank, self.group.size)
        if goes_with(stored, columns):
            self._add(module, columns_of(stored, columns))
        else:
            self._write_out(stored, columns)

    def _write_out(self, stored: StoredWeight, columns: Share) -> None:
        """Keep the numbers of a projection's only module: its groups cannot be cut where the columns are."""
        numbers = written_out(narrowed(stored, self.dtype))[:, columns.start : columns.stop]
        weight = numbers.new_zeros(self.size, dtype=self.dtype)
        weight[:, : columns.size] = numbers
        self.pieces = [PlainPiece(weight, slice(0, self.size[0]))]

    def fill_random(self, module: _Module, std: float, generator: torch.Generator | None) -> None:
        """Elements and scales as of a matrix of normal numbers, nearly."""
        kind, out_size, in_size = self.reader.kind, module.rows.stop - module.rows.start, self.size[1]
        group = in_size if self.reader.group == -1 else min(self.reader.group, in_size)
        size = (out_size, in_size)
        if kind == "fp8":
            numbers = torch.randn(size, generator=generator, device=self.device)
            values = numbers.to(torch.float8_e4m3fn).view(torch.uint8)
        else:
            most = 2 ** KINDS[kind].bits
            values = torch.randint(0, most, size, generator=generator, device=self.device, dtype=torch.uint8)
        scale = std / _SPREAD[kind]
        scale = 2.0 ** round(torch.tensor(scale).log2().item()) if kind == "fp4" else scale
        dtype = torch.float32 if kind == "fp8" else self.dtype
        scales = torch.full((out_size, -(-in_size // group)), scale, dtype=dtype, device=self.device)
        # What is stored is above 0 then.
        shifts = scales * -(2 ** (KINDS[kind].bits - 1)) if self.reader.has_shifts else None
        self._add(module, StoredWeight(values, scales, None, kind, group, shifts=shifts))

    def _add(self, module: _Module, stored: StoredWeight) -> None:
        self._stored[module.rows.start] = stored
        if len(self._stored) == len(self._modules):
            parts = [self._stored[start] for start in sorted(self._stored)]
            self._stored = {}
            self.pieces = list(self._packed(parts))

    def _packed(self, parts: list[StoredWeight]) -> Sequence[Piece]:
        parts = [narrowed(part, self.dtype) for part in parts]
        if all(go_together(parts[0], part) for part in parts[1:]):
            parts = [joined(parts)]
        is_gated = self.projection.is_gated and len(parts) == 1 and self.bias is None
        pieces, start = [], 0
        for part in parts:
            weight = pack(
                part.values, part.scales, part.kind, part.group, part.zeros,
                global_scale=part.global_scale, is_gated=is_gated, shifts=part.shifts,
            )  # fmt: skip
            pieces.append(Piece(weight, slice(start, start + part.values.shape[0]), part.order))
            start += part.values.shape[0]
        return pieces


class ModuleTensor:
    """Where one tensor of a module goes."""

    def __init__(self, linear: PackedLinear, module: _Module, suffix: str) -> None:
        shape, self.dtypes = module.matrix.tensors[suffix]
        self.shape = torch.Size(shape)
        self.device = linear.device
        self._linear, self._module, self._suffix = linear, module, suffix

    @property
    def nbytes(self) -> int:
        """All that becomes of the module, at its first tensor."""
        reader, (out_size, in_size) = self._linear.reader, self._size
        if not self._is_first:
            return 0
        return packed_bytes(out_size, in_size, reader.kind, reader.group, self._linear.bytes_a_group)

    @property
    def format_name(self) -> str:
        return self._linear.reader.name

    @property
    def reader(self) -> StoredReader:
        return self._linear.reader

    @property
    def num_weights(self) -> int:
        """All of the module's at its first tensor."""
        out_size, in_size = self._size
        return out_size * in_size if self._is_first else 0

    @property
    def _size(self) -> tuple[int, int]:
        rows = self._module.rows
        return rows.stop - rows.start, self._linear.size[1]

    @property
    def _is_first(self) -> bool:
        return self._module.matrix.is_first(self._suffix)

    def numel(self) -> int:
        return self.shape.numel()

    def copy_(self, source: Tensor) -> None:
        self._linear.take(self._module, self._suffix, source.to(self.device))

    def normal_(self, mean: float, std: float, *, generator: torch.Generator | None = None) -> None:
        """All of the module at its first tensor."""
        if self._is_first:
            self._linear.fill_random(self._module, std, generator)
