"""The device "cuda" is there though there is none: what PyTorch and the package are told meanwhile.

What happens on it is `fake_cuda`'s.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from cb_backend.engine.runner.step_buffers import StepBuffers
from cb_backend.engine.runner.step_runner import StepRunner
from tests.engine.fake_cuda import FakeCuda, FakeGraph


@contextlib.contextmanager
def fake_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """The device "cuda" is there meanwhile."""
    fake = FakeCuda()

    class Event:
        def __init__(self) -> None:
            self._at = 0

        def record(self, stream: object = None) -> None:
            self._at = fake.now

        def synchronize(self) -> None:
            fake.settle(self._at)

    class Stream:
        """All streams are one here: what is launched first is done first."""

        def __init__(self, device: torch.device | None = None) -> None:
            pass

        def wait_stream(self, other: Stream) -> None:
            pass

        def wait_event(self, event: Event) -> None:
            pass

        def record_event(self) -> Event:
            event = Event()
            event.record()
            return event

        def synchronize(self) -> None:
            fake.settle(fake.now)

    class Thread(threading.Thread):
        def run(self) -> None:
            with fake:  # modes are a thread's own
                super().run()

    run_step = StepRunner.run_step

    def run_or_capture(runner: StepRunner, buffers: StepBuffers) -> None:
        if fake.capturing is not None:
            fake.capturing.calls.append(lambda: run_step(runner, buffers))
        run_step(runner, buffers)

    monkeypatch.setattr(StepRunner, "run_step", run_or_capture)
    monkeypatch.setattr(threading, "Thread", Thread)
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: None)
    stand_ins = {
        "Stream": Stream,
        "current_stream": lambda device=None: Stream(),
        "stream": contextlib.nullcontext,
        "is_available": lambda: True,
        "Event": Event,
        "CUDAGraph": FakeGraph,
        "graph": fake.capture,
        "synchronize": lambda device=None: fake.settle(fake.now),
        "mem_get_info": lambda device=None: (8 << 30, 10 << 30),  # free, in all
        "reset_peak_memory_stats": lambda device=None: None,
        "max_memory_allocated": lambda device=None: 0,
        "memory_reserved": lambda device=None: 0,
        "memory_allocated": lambda device=None: 0,
        "empty_cache": lambda: None,
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    with fake:
        yield fake
