"""Ranks on devices that are none: each process has its fake device, and they add up over gloo.

python -m tests.engine.fake_ranks ...    # the process of a rank above 0, with the arguments of `worker_process`
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from cb_backend.engine import worker_process, workers
from cb_backend.engine.runner import ranks
from cb_backend.parallel.torch_group import TorchGroup, join_group
from tests.engine.fake_cuda import CPU
from tests.engine.fake_device import fake_device


def use_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within `fake_device`: ranks meet, as many as are asked for."""

    def join(folder: Path, rank: int, size: int, device: torch.device) -> TorchGroup:
        return TorchGroup(join_group(folder, rank, size, CPU).processes, device)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(ranks, "join_group", join)
    monkeypatch.setattr(workers, "WORKER_MODULE", "tests.engine.fake_ranks")


if __name__ == "__main__":
    patched = pytest.MonkeyPatch()
    with fake_device(patched):
        use_ranks(patched)
        sys.exit(worker_process.main())
