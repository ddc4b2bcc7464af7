"""What is said of adapters (LoRA) between rooms: which one a request wants, and which of their contents is meant."""

from __future__ import annotations

import msgspec

NO_ADAPTER = -1  # in place of a device slot: the model as it is

DEFAULT_MAX_LORAS = 8  # places of adapters in a batch, where nobody says otherwise
CPU_FACTOR = 4  # see `num_kept`
NOT_ENABLED = "LoRA feature is not enabled."  # clients of vllm_backend compare with this text

AdapterKey = bytes  # blake2b-128 of packed weights and scales: equal keys are equal contents, whatever their names


class AdapterSource(msgspec.Struct, frozen=True):
    """An adapter's files as they stood when they were looked at. They come from the model's own folder, never from a
    client."""

    name: str  # as requests give it
    path: str  # folder
    mtime_ns: int  # of the newer of its files; 0: they are not there
    size: int  # bytes of both
    file_id: int = 0  # another one where other files have come to their place, of whatever time and size
    ctime_ns: int = 0  # as `mtime_ns`, of changes of any kind: a copy that keeps the former does not keep it


def num_kept(max_cpu_loras: int | None, num_slots: int) -> int:
    """Adapters that stay in host memory: as configured, or several times those that the device has slots for."""
    return max(CPU_FACTOR * num_slots if max_cpu_loras is None else max_cpu_loras, num_slots)
