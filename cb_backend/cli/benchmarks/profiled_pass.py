"""One untimed pass of a workload under torch's profiler, which records what the device ran in a few windows of steps.

Short passes are recorded whole. Of longer ones there are two windows, the first steps and as many in the middle of the
rest: prompts come first, and a profiler that records everything needs more memory and time than the pass itself.
Without a device it is the operators that are recorded, with the time that is their own.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import DeviceType

from cb_backend.cli.benchmarks.kernel_times import Event, summarize
from cb_backend.contracts.adapters import AdapterKey
from cb_backend.contracts.step import MaskSource, Pending, StepPlan
from cb_backend.engine.llm_engine import LLMEngine
from cb_backend.study.timed_pass import run_pass
from cb_backend.study.workloads import Workload

# Waits of the host, which the profiler counts among the device's events.
_WAIT = re.compile(r"(Context|Stream|Event) Sync|Stream Wait Event")


def choose_windows(num_steps: int, most: int) -> list[range]:
    """Which of a pass's `num_steps` steps (from 0) to record, `most` in all (at least 2 of a longer pass)."""
    if num_steps <= most:
        return [range(num_steps)]
    half = max(1, most // 2)
    second = half + (num_steps - 2 * half) // 2
    return [range(half), range(second, second + half)]


def profile_pass(
    engine: LLMEngine,
    workload: Workload,
    temperature: float,
    num_steps: int,
    most: int,
    adapters: Sequence[AdapterKey] = (),
) -> list[dict[str, Any]]:
    """Run the workload on an engine made by `fresh_engine`; returns the figures of each window that was reached.

    `num_steps`: what the same work took before. The pass is run to its end whatever it takes now. `adapters` as in
    `run_pass`.
    """
    is_device = engine.info.device == "cuda"
    profiled = ProfiledRunner(engine.runner, choose_windows(num_steps, most), is_device)
    wrapped: Any = engine
    wrapped.runner = profiled
    try:
        run_pass(engine, workload, temperature, adapters)
    finally:
        profiled.stop()
    return [window.figures(profiled.num_steps) for window in profiled.recorded]


class _Window:
    """What the profiler records from now on."""

    def __init__(self, first_step: int, is_device: bool) -> None:
        self.first_step = first_step  # from 0
        self.num_steps = 0
        self.num_steps_with_prompts = 0
        self._is_device = is_device
        activity = torch.profiler.ProfilerActivity.CUDA if is_device else torch.profiler.ProfilerActivity.CPU
        self._profiler = torch.profiler.profile(activities=[activity])
        self._profiler.start()

    def stop(self) -> None:
        if self._is_device:
            torch.cuda.synchronize()
        self._profiler.stop()

    def figures(self, num_pass_steps: int) -> dict[str, Any]:
        return {
            "is_device": self._is_device,
            "first_step": self.first_step + 1,
            "pass_steps": num_pass_steps,
            "steps_with_prompts": self.num_steps_with_prompts,
            **summarize(read_events(self._profiler.events() or [], self._is_device), self.num_steps),
        }


def read_events(events: Any, is_device: bool) -> list[Event]:
    """The profiler's events that are work of the device (or, without one, operators)."""
    found = []
    for event in events:
        is_of_device = event.device_type != DeviceType.CPU
        if is_of_device != is_device or getattr(event, "is_user_annotation", False) or _WAIT.match(event.name):
            continue
        start, end = float(event.time_range.start), float(event.time_range.end)
        found.append(Event(event.name, start, end, end - start if is_device else float(event.self_cpu_time_total)))
    return found


class ProfiledRunner:
    """Stands in front of the runner and has the profiler record the steps of the windows."""

    def __init__(self, inner: Any, windows: list[range], is_device: bool) -> None:
        self.num_steps = 0
        self.recorded: list[_Window] = []
        self._inner = inner
        self._windows = windows
        self._open: _Window | None = None
        self._is_device = is_device
        if is_device:
            # As torch does for its own CUDA graphs: taking the tracer down between windows can crash their replays.
            os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")
            os.environ.setdefault("TEARDOWN_CUPTI", "0")

    def execute(self, plan: StepPlan, masks: MaskSource) -> Pending:
        if self._open is not None and self.num_steps == self._windows[0].stop:
            self.stop()
            del self._windows[0]
        if self._windows and self.num_steps == self._windows[0].start:
            if self._is_device:
                torch.cuda.synchronize()  # the steps launched before are none of the window's
            self._open = _Window(self.num_steps, self._is_device)
            self.recorded.append(self._open)
        pending: Pending = self._inner.execute(plan, masks)
        self.num_steps += 1
        if self._open is not None:
            self._open.num_steps += 1
            self._open.num_steps_with_prompts += plan.num_rows > plan.num_decode_rows
        return pending

    def stop(self) -> None:
        """End the window that is open, if any, when the device has done its steps."""
        if self._open is not None:
            self._open.stop()
            self._open = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
