"""Adapters of a model over several ranks: rank 0 reads each once, hands it to the others, and all keep their shares.

An adapter is whole in memory that the ranks share while each copies its share out of it, on a thread of its own. A read
is over when all have theirs, so that no step waits for one, and all have it from the same bytes of the same files. What
a rank cannot take is the fault of the requests that name the adapter. A share is kept by the others for as long as rank
0 keeps its own: plans tell what may be forgotten, in order with those that load it.
"""

from __future__ import annotations

import itertools
import mmap
import os
import socket
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from cb_backend.contracts.errors import UnavailableError
from cb_backend.contracts.step import StepPlan
from cb_backend.engine.runner.step_adapters import StepAdapters
from cb_backend.layers.adapter_table import AdapterTable
from cb_backend.models.lora_checkpoint import read_adapter
from cb_backend.models.spec import ModelSpec
from cb_backend.parallel.hand_over import LABEL_BYTES, Giver, NotTakenError, new_memory, take_all
from cb_backend.parallel.worker_plan import encode_plan
from cb_backend.support.adapter_files import Stamp


@dataclass(frozen=True, eq=False)
class SharedAdapter:
    """A rank's share of an adapter. While rank 0's lives, the others keep theirs."""

    key: bytes  # of the whole adapter; where it was handed over the label, which plans for that rank have in its place
    label: bytes  # what the ranks call this hand-over
    data: Tensor  # as `PackedAdapter.data`, of this rank's table
    stamp: Stamp | None = None  # as `PackedAdapter.stamp`


class SharingAdapters:
    """Implements `adapters.AdapterReader` as rank 0, over the slots of its own table."""

    def __init__(self, own: StepAdapters, spec: ModelSpec, giver: Giver) -> None:
        self.own = own
        self._shared_of: Callable[[bytes], SharedAdapter] | None = None
        self._spec = spec
        self._giver = giver
        self._numbers = itertools.count()
        self._forgotten: deque[bytes] = deque()  # labels, until the next plan

    @property
    def table(self) -> AdapterTable:
        return self.own.table

    @property
    def packed_of(self) -> Callable[[bytes], SharedAdapter] | None:
        return self._shared_of

    @packed_of.setter
    def packed_of(self, packed_of: Callable[[bytes], SharedAdapter]) -> None:
        self._shared_of = self.own.packed_of = packed_of

    def read(self, path: str) -> SharedAdapter:
        """An adapter's folder; returns when every rank has its share. For any thread.

        Raises `ConfigError` for what cannot be served, `UnavailableError` where a rank cannot take it, `MemoryError`.
        """
        label = next(self._numbers).to_bytes(LABEL_BYTES, "little")
        whole = self.table.whole
        descriptor, memory = new_memory(whole.bytes_per_adapter)
        try:
            packed = read_adapter(Path(path), self._spec, whole, lambda: torch.frombuffer(memory, dtype=torch.uint8))
            data = self.table.share_of(packed.data)
            self._giver.give(label, descriptor)
        except NotTakenError as error:
            self._forgotten.append(label)  # some may have it
            raise UnavailableError(str(error)) from None
        finally:
            os.close(descriptor)
        shared = SharedAdapter(packed.key, label, data, packed.stamp)
        weakref.finalize(shared, self._forgotten.append, label).atexit = False
        return shared

    def encode(self, plan: StepPlan) -> bytes:
        """The plan for the other ranks, with what it loads by its label, and with what they may forget."""
        loads = []
        for slot, key in plan.adapter_loads:
            assert self._shared_of is not None, "a plan loads adapters that nobody keeps"
            loads.append((slot, self._shared_of(key).label))
        forgotten = tuple(self._forgotten.popleft() for _ in range(len(self._forgotten)))
        return encode_plan(plan, tuple(loads), forgotten)

    def close(self) -> None:
        self._giver.close()


class TakenAdapters:
    """Another rank's shares, by their labels, which in its plans stand for keys."""

    def __init__(self, own: StepAdapters, end: socket.socket, device: torch.device) -> None:
        """Begins to take what rank 0 gives. end: of the connection to it."""
        self._table = own.table
        self._device = device
        self._kept: dict[bytes, SharedAdapter] = {}
        self._not_wanted: set[bytes] = set()  # forgotten before they came
        self._lock = threading.Lock()
        own.packed_of = self.packed_of
        threading.Thread(target=self._run, args=(end,), name="take-adapters", daemon=True).start()

    def packed_of(self, label: bytes) -> SharedAdapter:
        return self._kept[label]

    def forget(self, labels: Iterable[bytes]) -> None:
        with self._lock:
            for label in labels:
                if self._kept.pop(label, None) is None:
                    self._not_wanted.add(label)

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    def _run(self, end: socket.socket) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # a thread's own; what it pins is pinned for this device
        take_all(end, self._take)

    def _take(self, label: bytes, memory: mmap.mmap) -> None:
        data = self._table.share_of(torch.frombuffer(memory, dtype=torch.uint8))
        with self._lock:
            if label in self._not_wanted:
                self._not_wanted.remove(label)
            else:
                self._kept[label] = SharedAdapter(label, label, data)
