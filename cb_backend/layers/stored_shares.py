"""What a device takes of a matrix of few bits, as the checkpoint stores it: rows, and columns in whole groups.

Whatever way a checkpoint packs, its readers give one form (`StoredWeight`), which is cut here; so no format knows that
several devices share a matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from cb_backend.kernels.packed import KINDS, StoredWeight, dequantise_packed_torch, pack
from cb_backend.parallel.shares import Share


def with_rows(stored: StoredWeight, change: Callable[[Tensor], Tensor]) -> StoredWeight:
    """The same change of the rows of all that a matrix consists of."""
    zeros, shifts = (None if each is None else change(each) for each in (stored.zeros, stored.shifts))
    return stored._replace(values=change(stored.values), scales=change(stored.scales), zeros=zeros, shifts=shifts)


def rows_of(stored: StoredWeight, shares: Sequence[Share]) -> StoredWeight:
    """These rows, one share behind the other, each padded with rows of zeros."""
    size = stored.values.shape[0]
    if sum(share.size for share in shares) == size == sum(share.room for share in shares):
        return stored  # all of them, in their order
    taken = with_rows(stored, lambda rows: torch.cat([_in_room(rows, share) for share in shares]))
    return _padded_with_zeros(taken, [share.room - share.size for share in shares], [share.room for share in shares])


def _in_room(rows: Tensor, share: Share) -> Tensor:
    found = rows.new_zeros(share.room, *rows.shape[1:])
    found[: share.size] = rows[share.start : share.stop]
    return found


def _padded_with_zeros(stored: StoredWeight, missing: Sequence[int], rooms: Sequence[int]) -> StoredWeight:
    """Elements of padding as what stands for zero: their scales are 0, and their values the zero point."""
    offset = KINDS[stored.kind].offset or 0
    stop = 0
    for number, room in zip(missing, rooms, strict=True):
        stop += room
        stored.values[stop - number : stop] = offset
        if stored.zeros is not None:
            stored.zeros[stop - number : stop] = offset
    return stored


def goes_with(stored: StoredWeight, columns: Share) -> bool:
    """Whether the groups of scales can be cut where these columns are."""
    if _is_all(stored, columns):
        return True
    if stored.order is not None:
        return False
    begins, ends = columns.start % stored.group == 0, columns.stop % stored.group == 0
    return _has_one_scale(stored) or not columns.size or (begins and (ends or columns.stop == stored.values.shape[1]))


def columns_of(stored: StoredWeight, columns: Share) -> StoredWeight:
    """These columns, padded with zeros; `goes_with` them."""
    if _is_all(stored, columns):
        return stored
    values = stored.values.new_full((stored.values.shape[0], columns.room), KINDS[stored.kind].offset or 0)
    values[:, : columns.size] = stored.values[:, columns.start : columns.stop]
    if _has_one_scale(stored):
        return stored._replace(values=values, group=columns.room)
    first, num_groups = columns.start // stored.group, -(-columns.room // stored.group)
    last = -(-columns.stop // stored.group)

    def of_groups(each: Tensor | None, padding: int = 0) -> Tensor | None:
        if each is None:
            return None
        found = each.new_full((each.shape[0], num_groups), padding)
        found[:, : last - first] = each[:, first:last]
        return found

    scales = of_groups(stored.scales)
    assert scales is not None
    zeros = of_groups(stored.zeros, KINDS[stored.kind].offset or 0)
    return stored._replace(values=values, scales=scales, zeros=zeros, shifts=of_groups(stored.shifts))


def written_out(stored: StoredWeight) -> Tensor:
    """The matrix's numbers [out_size, in_size] in float32, columns in their own order."""
    packed = pack(
        stored.values, stored.scales, stored.kind, stored.group, stored.zeros,
        global_scale=stored.global_scale, shifts=stored.shifts,
    )  # fmt: skip
    numbers = dequantise_packed_torch(packed)
    if stored.order is None:
        return numbers
    ordered = torch.empty_like(numbers)
    ordered[:, stored.order] = numbers
    return ordered


def _is_all(stored: StoredWeight, columns: Share) -> bool:
    return columns == Share(0, stored.values.shape[1], stored.values.shape[1])


def _has_one_scale(stored: StoredWeight) -> bool:
    """For a whole row."""
    return stored.scales.shape[1] == 1 and stored.shifts is None
