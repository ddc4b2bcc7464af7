"""Runs traffic through an engine, real or simulated, and keeps what happened: token times, steps, use of slots and
cache. The same code drives both, so that a prediction and its measurement differ in nothing but the runner and the
clock. Figures are made elsewhere (`figures`).
"""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from cb_backend.contracts.adapters import AdapterKey
from cb_backend.contracts.errors import CbError
from cb_backend.contracts.request import Request
from cb_backend.contracts.step import EngineOutput
from cb_backend.contracts.token_rules import TokenRules
from cb_backend.engine.adapter_wait import take_adapter
from cb_backend.engine.llm_engine import LLMEngine
from cb_backend.engine.scheduler.admission import ContinuousAdmission, PolicyKind
from cb_backend.study.answer_lengths import AnswerLengths
from cb_backend.study.latencies import Latencies, latencies
from cb_backend.study.traffic import Traffic
from cb_backend.support.collection import no_collection

Clock = Callable[[], float]
Sleep = Callable[[float], None]
Progress = Callable[[int, int], None]  # requests ended, requests in all
Say = Callable[[str], Progress]  # names a replay that begins; returns who is told of its progress
PROGRESS_EVERY = 8  # steps; on a slow device one takes seconds

Floats = NDArray[np.float64]


class ReplayError(CbError):
    """The replay did not do the work it was given, so it has no figures."""


@dataclass(frozen=True, slots=True)
class Steps:
    """What happened in each step, in order. Times in seconds after the start."""

    shapes: Floats  # [num_steps, 5], columns as in `step_times`
    begins: Floats  # [num_steps] when the engine began to plan it, or the end of the step before if that was later
    ends: Floats  # [num_steps] when its result had been taken in
    costs: Floats  # [num_steps] seconds that are its own: see `StepNotes.steps`
    num_free_blocks: NDArray[np.int64]  # [num_steps] after it
    num_waiting: NDArray[np.int64]  # [num_steps] after it

    @property
    def seconds(self) -> Floats:
        return self.ends - self.begins

    @property
    def num_rows(self) -> Floats:
        """Requests for which the step computed something."""
        return self.shapes[:, 0] + self.shapes[:, 4]


@dataclass(frozen=True, slots=True)
class Replay:
    """One pass of some traffic."""

    seconds: float  # from the start to the last token
    idle_seconds: float  # of them, waiting for the next arrival with nothing to do
    num_slots: int
    num_blocks: int
    num_requests: int
    num_output_tokens: int
    num_prompt_tokens: int
    num_cached_prompt_tokens: int
    num_preemptions: int
    num_adapter_loads: int
    latencies: Latencies
    steps: Steps
    wall_seconds: float  # that the replay itself took; less than `seconds` in a simulation


def fresh_engine(
    engine: LLMEngine, clock: Clock = time.monotonic, policy: PolicyKind = ContinuousAdmission, /, **changes: object
) -> LLMEngine:
    """A new scheduler and an empty KV cache over the same runner; `changes` are engine arguments."""
    config = dataclasses.replace(engine.config, **changes)  # type: ignore[arg-type]
    info = engine.info
    if config.num_gpu_blocks_override is not None:
        info = msgspec.structs.replace(info, num_blocks=min(info.num_blocks, config.num_gpu_blocks_override))
    return LLMEngine(config, engine.runner, info, clock, policy)


def replay(
    engine: LLMEngine,
    traffic: Traffic,
    clock: Clock = time.monotonic,
    sleep: Sleep = time.sleep,
    progress: Progress | None = None,
    adapters: Sequence[AdapterKey] = (),
) -> Replay:
    """Run the traffic to its end on an engine that has done nothing yet (`fresh_engine`, `simulated_engine`).

    `adapters`: one a request, for an engine with slots for them; empty: all go through the model as it is.

    `clock` and `sleep` must be those that the engine lives by. Raises `ReplayError` when a request ends with another
    number of tokens than it should, and the engine's own errors for a request that it refuses.
    """
    runner = AnswerLengths(engine, traffic.output_lens, clock)
    wall = time.perf_counter()
    start = clock()
    requests = _requests(engine, traffic, runner.stop_id, adapters)
    outputs, idle, notes = drive(engine, requests, traffic.arrivals, start, clock, sleep, progress)
    seconds = (outputs[-1][0] if outputs else clock()) - start
    stats = engine.stats()
    return Replay(
        seconds=seconds,
        idle_seconds=idle,
        num_slots=engine.scheduler.num_slots,
        num_blocks=engine.info.num_blocks,
        num_requests=len(traffic),
        num_output_tokens=traffic.num_output_tokens,
        num_prompt_tokens=sum(traffic.prompt_lens),
        num_cached_prompt_tokens=stats.num_cached_prompt_tokens,
        num_preemptions=stats.num_preemptions,
        num_adapter_loads=0 if stats.adapters is None else stats.adapters.num_loads,
        latencies=token_latencies(traffic.arrivals, traffic.output_lens, outputs, start),
        steps=notes.steps(np.array(runner.shapes, np.float64).reshape(-1, 5), np.array(runner.launch_seconds), start),
        wall_seconds=time.perf_counter() - wall,
    )


@contextmanager
def no_collections() -> Iterator[None]:
    """As the engine process does: a collection of the whole heap in the middle of a step is no property of it."""
    gc.collect()
    with no_collection():
        yield


def _requests(
    engine: LLMEngine, traffic: Traffic, stop_id: int, adapters: Sequence[AdapterKey]
) -> Callable[[int], Request]:
    def make(index: int) -> Request:
        params = TokenRules(
            max_tokens=traffic.max_tokens[index],
            temperature=0.0,
            ignore_eos=True,
            stop_token_ids=(stop_id,),
            seed=index,
        )
        request = engine.make_request(index, traffic.prompts[index], params)
        if adapters:
            take_adapter(request, adapters[index])
        return request

    return make


@dataclass(slots=True)
class StepNotes:
    """Filled by `drive`, a step at a time: a few list appends, so that the device does not wait for it."""

    num_launched: list[int] = field(default_factory=list)  # by call of `step` that finished a step
    begins: list[float] = field(default_factory=list)  # of those calls
    ends: list[float] = field(default_factory=list)
    num_free_blocks: list[int] = field(default_factory=list)
    num_waiting: list[int] = field(default_factory=list)

    def steps(self, shapes: Floats, launch_seconds: Floats, start: float) -> Steps:
        """`shapes` [num_steps, 5] and seconds in `execute` [num_steps] of all steps, in order of their launch.

        With run-ahead a call of `step` launches one step and waits for an earlier one. Where launching takes long (it
        may have to wait for the device), that time belongs to the step that is launched; the rest of the call to the
        one that ends.
        """
        count = len(self.ends)
        call = np.repeat(np.arange(count), self.num_launched)[:count]  # the call that launched each step
        begins, ends = np.array(self.begins) - start, np.array(self.ends) - start
        launched = begins[call]
        begins = np.maximum(launched, np.append(-np.inf, ends[:-1])) if count else launched
        own = launch_seconds[:count]
        costs = ends - begins - np.bincount(call, own, count) + own if count else own
        free, waiting = np.array(self.num_free_blocks), np.array(self.num_waiting)
        return Steps(shapes[:count], begins, ends, costs, free, waiting)


def drive(
    engine: LLMEngine,
    make_request: Callable[[int], Request],
    arrivals: Sequence[float],
    start: float,
    clock: Clock,
    sleep: Sleep,
    progress: Progress | None = None,
) -> tuple[list[tuple[float, EngineOutput]], float, StepNotes]:
    """Add each request when its time has come and step until all have ended.

    Returns each output with the time it came, the seconds slept, and the steps' times.
    """
    outputs: list[tuple[float, EngineOutput]] = []
    notes = StepNotes()
    scheduler = engine.scheduler
    order = sorted(range(len(arrivals)), key=arrivals.__getitem__)
    num_joined, num_ended, idle = 0, 0, 0.0
    while num_joined < len(order) or engine.has_unfinished():
        now = clock()
        while num_joined < len(order) and arrivals[order[num_joined]] <= now - start:
            engine.add_request(make_request(order[num_joined]))
            num_joined += 1
        if not engine.has_unfinished():
            pause = arrivals[order[num_joined]] - (now - start)
            sleep(pause)
            idle += pause
            continue
        num_steps = engine.log.num_steps
        output = engine.step()
        if output is None:
            continue
        end = clock()
        outputs.append((end, output))
        notes.num_launched.append(engine.log.num_steps - num_steps)
        notes.begins.append(now)
        notes.ends.append(end)
        notes.num_free_blocks.append(scheduler.num_free_blocks)
        notes.num_waiting.append(scheduler.num_waiting)
        num_ended += int(np.count_nonzero(output.finish_reasons))
        if progress is not None and len(outputs) % PROGRESS_EVERY == 0:
            progress(num_ended, len(order))
    return outputs, idle, notes


def token_latencies(
    arrivals: Sequence[float],
    output_lens: Sequence[int],
    outputs: Sequence[tuple[float, EngineOutput]],
    start: float,
) -> Latencies:
    """Pool the tokens of all outputs; entries without a token (an end on its own) do not count.

    Raises `ReplayError` if a request has another number of tokens than `output_lens` says.
    """
    ids = np.concatenate([np.empty(0, np.int64), *(output.request_ids for _, output in outputs)])
    tokens = np.concatenate([np.empty(0, np.int32), *(output.token_ids for _, output in outputs)])
    times = np.repeat([moment - start for moment, _ in outputs], [len(output.request_ids) for _, output in outputs])
    is_token = tokens >= 0
    counts = np.bincount(ids[is_token], minlength=len(arrivals))
    wrong = np.flatnonzero(counts != np.asarray(output_lens))
    if len(wrong):
        index = int(wrong[0])
        raise ReplayError(
            f"{len(wrong)} requests ended early, the first with {counts[index]} of"
            f" {output_lens[index]} tokens; the KV cache or max_model_len is too small for these lengths"
        )
    return latencies(arrivals, ids[is_token], times[is_token])
