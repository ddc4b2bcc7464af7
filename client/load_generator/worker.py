"""One client process: an event loop that sends its share of the requests and notes what comes back.

The parent (`fleet`) talks to it over a pipe: Ready, then start at a common instant, Progress twice a second with the
records of finished requests, Done. It knows nothing of statistics.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from cb_backend.traffic.workload import PlannedRequest

from .contracts import ClientHealth, Done, Progress, Ready, WorkerSpec
from .prompts import PromptBuilder
from .records import RequestRecord, Status
from .wire import exchange, open_connections

PROGRESS_INTERVAL_S = 0.5
LAG_SAMPLE_S = 0.02
PREBUILT_BYTES = 64 << 20  # of requests kept ready to send, a process
WARM_UP_SEED = 0x5EED  # warm-up prompts differ from measured ones, so that they fill no prefix cache for them
WARM_UP_TIMEOUT_S = 300.0


def run_process(spec: WorkerSpec, pipe: Connection, next_index: Any) -> None:
    """Entry point of a spawned process. `next_index`: shared counter of the closed loop (multiprocessing.Value)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent says what to do

    def take() -> int:
        with next_index.get_lock():
            next_index.value += 1
            return int(next_index.value) - 1

    asyncio.run(_Worker(spec, pipe, take).run())


class _Worker:
    """State of one process. `_stopping` is set by the parent's stop message or its end."""

    def __init__(self, spec: WorkerSpec, pipe: Connection, take_index: Callable[[], int]) -> None:
        self._spec = spec
        self._pipe = pipe
        self._take_index = take_index
        # NOTE: one thread: messages leave one after the other and in their order, also where one takes long. The parent
        # stops listening at the Done; a report that came after it would be lost with its records.
        self._sender = ThreadPoolExecutor(max_workers=1)
        self._builder = PromptBuilder(spec.vocabulary, spec.seed)
        self._started: asyncio.Future[float] | None = None
        self._stopping = asyncio.Event()
        self._origin = 0.0  # perf_counter of the start of the run, the same instant in all processes
        self._in_flight: dict[RequestRecord, asyncio.Task[None]] = {}
        self._finished: list[RequestRecord] = []
        self._totals = Progress()
        self._lags: list[float] = []

    def _clock(self) -> float:
        return time.perf_counter() - self._origin

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        self._started = loop.create_future()
        loop.add_reader(self._pipe.fileno(), self._on_message)
        async with open_connections(self._spec.url, self._spec.num_connections) as streams:
            ready = await self._warm_up(streams)
            prepared = _prepared(self._spec, self._builder) if self._spec.num_streams is None else iter(())
            await self._send(ready)
            self._origin = await self._started
            watchers = [asyncio.create_task(self._report()), asyncio.create_task(self._sample_lag())]
            cpu_start = time.process_time()
            await asyncio.sleep(max(0.0, -self._clock()))
            sender = asyncio.create_task(
                self._closed_loop(streams) if self._spec.num_streams else self._open_loop(streams, prepared)
            )
            await self._until_sent_or_stopped(sender)
            await self._drain()
            cpu_share = (time.process_time() - cpu_start) / max(self._clock(), 1e-9)
            for task in watchers:
                task.cancel()
            await asyncio.gather(*watchers, return_exceptions=True)
            await self._send(Done(self._take_progress(), ClientHealth(self._spec.process, cpu_share, self._lags)))
        loop.remove_reader(self._pipe.fileno())
        self._sender.shutdown()

    def _on_message(self) -> None:
        """("start", instant) or ("stop",); a closed pipe is a stop as well: the parent is gone."""
        try:
            message = self._pipe.recv()
        except (EOFError, OSError):
            message = ("stop",)
        assert self._started is not None
        if message[0] == "start" and not self._started.done():
            self._started.set_result(message[1])
            return
        asyncio.get_running_loop().remove_reader(self._pipe.fileno())
        self._stopping.set()
        if not self._started.done():
            self._started.set_result(time.perf_counter())

    async def _send(self, message: Any) -> None:
        # In a thread: a parent that is busy writing must not stop this loop's clock.
        try:
            await asyncio.get_running_loop().run_in_executor(self._sender, self._pipe.send, message)
        except OSError:
            self._stopping.set()

    async def _warm_up(self, streams: Iterator[Any]) -> Ready:
        builder = PromptBuilder(self._spec.vocabulary, self._spec.seed ^ WARM_UP_SEED)
        start = time.perf_counter()
        records = []
        exchanges = []
        for plan in self._spec.warm_up:
            record = _new_record(plan, self._spec.process, 0.0)
            records.append(record)
            request = self._spec.wire.request(f"warm-{plan.request_id}", builder.build(plan), plan.num_output_tokens)
            exchanges.append(
                exchange(
                    next(streams), request, record, lambda: time.perf_counter() - start, timeout_s=WARM_UP_TIMEOUT_S
                )
            )
        await asyncio.gather(*exchanges)
        errors = [record.error for record in records if record.error]
        return Ready(sum(record.status is Status.OK for record in records), errors[0] if errors else None)

    async def _until_sent_or_stopped(self, sender: asyncio.Task[None]) -> None:
        # In a closed loop the streams wait for their last answers, and after duration_s that is _drain's business.
        is_timed = self._spec.num_streams is not None and self._spec.duration_s is not None
        timeout = max(0.0, (self._spec.duration_s or 0.0) - self._clock()) if is_timed else None
        stop = asyncio.create_task(self._stopping.wait())
        await asyncio.wait({sender, stop}, return_when=asyncio.FIRST_COMPLETED, timeout=timeout)
        stop.cancel()
        sender.cancel()
        await asyncio.gather(sender, stop, return_exceptions=True)
        if not sender.cancelled() and sender.exception() is not None:
            raise sender.exception()  # type: ignore[misc]

    async def _open_loop(self, streams: Iterator[Any], prepared: Iterator[tuple[PlannedRequest, bytes]]) -> None:
        """Send each request at its time, whatever became of the earlier ones."""
        for plan, request in prepared:
            await asyncio.sleep(max(0.0, plan.scheduled_s - self._clock()))
            self._start(plan, request, next(streams), plan.scheduled_s)

    async def _closed_loop(self, streams: Iterator[Any]) -> None:
        """Keep `num_streams` requests in flight; requests are taken from one list by all processes."""
        await asyncio.gather(*(self._one_stream(next(streams)) for _ in range(self._spec.num_streams or 0)))

    async def _one_stream(self, open_stream: Any) -> None:
        spec = self._spec
        while spec.duration_s is None or self._clock() < spec.duration_s:
            index = self._take_index()
            if spec.num_requests is not None and index >= spec.num_requests:
                return
            plan = replace(spec.requests[index % len(spec.requests)], request_id=index)
            request = self._request(plan)
            # Shielded: the end of sending must not cancel what is in flight; _drain decides about that.
            await asyncio.shield(self._start(plan, request, open_stream, self._clock()))

    def _request(self, plan: PlannedRequest) -> bytes:
        return self._spec.wire.request(str(plan.request_id), self._builder.build(plan), plan.num_output_tokens)

    def _start(self, plan: PlannedRequest, request: bytes, open_stream: Any, scheduled_s: float) -> asyncio.Task[None]:
        record = _new_record(plan, self._spec.process, scheduled_s)
        task = asyncio.create_task(
            exchange(
                open_stream,
                request,
                record,
                self._clock,
                has_token_counts=self._spec.wire.has_token_counts,
                cancel_after_tokens=plan.cancel_after_tokens,
                timeout_s=self._spec.request_timeout_s,
            )
        )
        self._in_flight[record] = task
        task.add_done_callback(lambda _: self._finish(record))
        return task

    def _finish(self, record: RequestRecord) -> None:
        del self._in_flight[record]
        self._finished.append(record)

    async def _drain(self) -> None:
        """Wait for what is in flight; cancel it after the time limit, or at once when told to stop."""
        deadline = self._clock() + self._spec.drain_timeout_s
        while self._in_flight and not self._stopping.is_set() and self._clock() < deadline:
            await asyncio.wait(set(self._in_flight.values()), timeout=0.1)
        tasks = list(self._in_flight.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # the done callbacks

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(PROGRESS_INTERVAL_S)
            await asyncio.shield(self._send(self._take_progress()))

    def _take_progress(self) -> Progress:
        records, self._finished = self._finished, []
        totals = self._totals
        self._totals = Progress(
            num_done=totals.num_done + len(records),
            num_failed=totals.num_failed + sum(r.status in (Status.REFUSED, Status.ERROR) for r in records),
            num_tokens=totals.num_tokens + sum(r.num_output_tokens for r in records),
        )
        return replace(
            self._totals,
            num_sent=self._totals.num_done + len(self._in_flight),
            num_tokens=self._totals.num_tokens + sum(r.num_output_tokens for r in self._in_flight),
            records=records,
        )

    async def _sample_lag(self) -> None:
        while True:
            due = time.perf_counter() + LAG_SAMPLE_S
            await asyncio.sleep(LAG_SAMPLE_S)
            self._lags.append(time.perf_counter() - due)


def _new_record(plan: PlannedRequest, process: int, scheduled_s: float) -> RequestRecord:
    return RequestRecord(
        request_id=plan.request_id,
        process=process,
        scheduled_s=scheduled_s,
        num_prompt_tokens=plan.num_prompt_tokens,
        num_output_tokens_wanted=plan.num_output_tokens,
    )


def _prepared(spec: WorkerSpec, builder: PromptBuilder) -> Iterator[tuple[PlannedRequest, bytes]]:
    """Requests of the open loop in order, serialised well before their time; the first ones are built right here."""
    plans = iter(spec.requests)
    ready: deque[tuple[PlannedRequest, bytes]] = deque()
    num_bytes = 0

    def build_one() -> int:
        plan = next(plans, None)
        if plan is None:
            return 0
        request = spec.wire.request(str(plan.request_id), builder.build(plan), plan.num_output_tokens)
        ready.append((plan, request))
        return len(request)

    while num_bytes < PREBUILT_BYTES and (added := build_one()):
        num_bytes += added

    def pull() -> Iterator[tuple[PlannedRequest, bytes]]:
        nonlocal num_bytes
        while ready:
            plan, request = ready.popleft()
            num_bytes -= len(request)
            yield plan, request
            # After the yield: built while the next request's time has not come yet.
            while num_bytes < PREBUILT_BYTES and (added := build_one()):
                num_bytes += added

    return pull()
