"""Every tensor of a model, wherever its layers keep it; and how they move into a range of memory.

A layer need not know of it: tensors are found by looking through the model's objects, and moved in place, so that
whoever has one has it still. Views of one storage move together.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from cb_backend.contracts.errors import ConfigError
from cb_backend.engine.runner.memory_range import MemoryRange, aligned

PACKAGE = "cb_backend"
KEPT_BYTES = 512 << 20  # of what tensors leave behind when they move: then it is given back


def parts_of(root: object) -> Iterator[tuple[str, Any]]:
    """(path, value) of all tensors, and of all numbers and texts, that are reached through objects of this package."""
    seen: set[int] = set()
    left: list[tuple[str, Any]] = [("", root)]
    while left:
        path, value = left.pop()
        if isinstance(value, Tensor | bool | int | float | str):
            yield path, value
            continue
        if id(value) in seen:
            continue
        seen.add(id(value))
        left += reversed([(f"{path}.{name}", part) for name, part in _own_parts(value)])


def _own_parts(value: Any) -> list[tuple[object, Any]]:
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, list | tuple):
        return list(enumerate(value))
    if isinstance(value, type) or not type(value).__module__.startswith(PACKAGE):
        return []
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    parts = [(name, getattr(value, name)) for name in slots if hasattr(value, name)]
    return [*parts, *getattr(value, "__dict__", {}).items()]


def tensors_of(root: object, device: torch.device) -> list[tuple[str, Tensor]]:
    """Those on the device that hold anything, each once."""
    found: dict[int, tuple[str, Tensor]] = {}
    for path, value in parts_of(root):
        if isinstance(value, Tensor) and value.device.type == device.type and value.untyped_storage().nbytes():
            found.setdefault(id(value), (path, value))
    return list(found.values())


def storage_bytes(tensors: list[tuple[str, Tensor]]) -> int:
    """What the tensors take in a range: storages, each once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for _, tensor in tensors}
    return sum(aligned(num_bytes) for num_bytes in storages.values())


@torch.inference_mode()
def move(tensors: list[tuple[str, Tensor]], into: MemoryRange) -> None:
    """Place the tensors' storages in the range, one after the other: there is never more than one of them twice."""
    by_storage: dict[int, list[Tensor]] = {}
    for _, tensor in tensors:
        by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
    left_behind = 0
    for sharing in by_storage.values():
        num_bytes = sharing[0].untyped_storage().nbytes()
        place = into.place(num_bytes)
        place.copy_(_bytes_of(sharing[0]))
        for tensor in sharing:
            _point(tensor, place)
        left_behind += num_bytes
        if left_behind >= KEPT_BYTES:
            left_behind = 0
            _give_back(place.device)
    if left_behind:
        _give_back(into.data.device)


def _give_back(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def _bytes_of(tensor: Tensor) -> Tensor:
    """All of its storage, uint8 [num_bytes]."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))


def _point(tensor: Tensor, place: Tensor) -> None:
    """Have the tensor be at `place` [bytes of its storage]."""
    offset = place.storage_offset() // tensor.element_size() + tensor.storage_offset()
    tensor.set_(place.untyped_storage(), offset, tensor.size(), tensor.stride())


class Places:
    """Where a model's tensors are, kept while its weights are filled anew: some layers make new tensors then."""

    def __init__(self, root: object, device: torch.device) -> None:
        self._root = root
        self._device = device
        self._tensors = dict(tensors_of(root, device))
        self._others = self._plain_values()

    @torch.inference_mode()
    def settle(self, is_end: bool) -> None:
        """Bring what is new to the places of what it replaces. Before the end there is also what is new and does not
        replace anything yet: parts of what is to come. Raises `ConfigError` where it does not fit.
        """
        for path, tensor in tensors_of(self._root, self._device):
            old = self._tensors.get(path)
            if old is tensor or (old is None and not is_end):
                continue
            if old is None or (old.shape, old.dtype, old.stride()) != (tensor.shape, tensor.dtype, tensor.stride()):
                had = "nothing" if old is None else f"{list(old.shape)} {old.dtype}"
                raise ConfigError(
                    f"weights at {path.lstrip('.')} are {list(tensor.shape)} {tensor.dtype} where the model has {had}; "
                    "load it as a model of its own"
                )
            old.copy_(tensor)
            tensor.set_(old.untyped_storage(), old.storage_offset(), old.size(), old.stride())
            self._tensors[path] = tensor

    @property
    def has_other_values(self) -> bool:
        """Whether numbers beside tensors have changed, which recorded launches know by value."""
        return self._plain_values() != self._others

    def _plain_values(self) -> dict[str, Any]:
        return {path: value for path, value in parts_of(self._root) if not isinstance(value, Tensor)}
