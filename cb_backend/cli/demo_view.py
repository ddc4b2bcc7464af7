"""What the demo shows: the streams while they run, as a live picture or as lines, and the table at the end.

A `Stream` is filled by the thread that follows it; the views only read. Nothing here knows servers or clients.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol

import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

LINE_LENGTH = 60  # characters after which a plain line is printed,
LINE_AGE_S = 0.5  # or seconds after which it is printed however short it is
SHOWN_CHARACTERS = 300  # of each stream in the live picture


@dataclass(slots=True)
class Stream:
    """One request as the client saw it. Times are `time.perf_counter()` seconds."""

    number: int
    prompt: str
    max_tokens: int
    started_at: float = 0.0
    text: str = ""
    finish_reason: str | None = None
    error: str | None = None
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    arrivals: list[tuple[float, int]] = field(default_factory=list)  # (time, tokens in the response)
    is_running: bool = False

    def add(self, response: Any) -> None:
        """Take one response of the client. Responses without tokens count for their text alone."""
        self.text += response.text
        self.finish_reason = response.finish_reason or self.finish_reason
        self.num_input_tokens = response.num_input_tokens or self.num_input_tokens
        if response.num_output_tokens:
            self.num_output_tokens += response.num_output_tokens
            self.arrivals.append((response.received_at, response.num_output_tokens))

    @property
    def ttft_ms(self) -> float:
        return (self.arrivals[0][0] - self.started_at) * 1000 if self.arrivals else float("nan")

    @property
    def inter_token_ms(self) -> list[float]:
        """Time before each token after the first response; of several tokens in one response, only the first waited."""
        gaps: list[float] = []
        for (before, _), (now, num_tokens) in zip(self.arrivals, self.arrivals[1:], strict=False):
            gaps += [(now - before) * 1000] + [0.0] * (num_tokens - 1)
        return gaps

    @property
    def tokens_per_s(self) -> float:
        seconds = self.arrivals[-1][0] - self.started_at if self.arrivals else 0.0
        return self.num_output_tokens / seconds if seconds > 0 else float("nan")


class View(Protocol):
    """What a stream's life looks like to the reader. Times are seconds since the first stream began."""

    def joins(self, stream: Stream, at: float) -> None: ...

    def text(self, stream: Stream, at: float, text: str) -> None: ...

    def leaves(self, stream: Stream, at: float) -> None: ...

    def __enter__(self) -> View: ...

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class LineView:
    """Lines: who joins, pieces of text of whoever has some, who leaves. For logs and pipes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: dict[int, str] = {}
        self._printed_at: dict[int, float] = {}
        self._running: set[int] = set()
        self._is_open = True

    def __enter__(self) -> LineView:
        return self

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._is_open = False  # streams that go on after an interrupt are nothing to look at

    def joins(self, stream: Stream, at: float) -> None:
        with self._lock:
            self._running.add(stream.number)
            prompt = " ".join(stream.prompt.split())
            shown = prompt if len(prompt) <= 48 else prompt[:45] + "..."
            self._print(at, stream, f"joins   ({len(self._running)} running) {shown!r}, max {stream.max_tokens} tokens")

    def text(self, stream: Stream, at: float, text: str) -> None:
        with self._lock:
            pending = self._pending.get(stream.number, "") + text
            is_old = at - self._printed_at.setdefault(stream.number, at) >= LINE_AGE_S
            if pending and (is_old or len(pending) >= LINE_LENGTH):
                self._print(at, stream, f"| {pending!r}")
                self._printed_at[stream.number] = at
                pending = ""
            self._pending[stream.number] = pending

    def leaves(self, stream: Stream, at: float) -> None:
        with self._lock:
            self._running.discard(stream.number)
            if pending := self._pending.pop(stream.number, ""):
                self._print(at, stream, f"| {pending!r}")
            end = stream.error or f"{stream.finish_reason} after {stream.num_output_tokens} tokens"
            self._print(at, stream, f"leaves  ({len(self._running)} running) {end}")

    def _print(self, at: float, stream: Stream, text: str) -> None:
        if self._is_open:
            print(f"[{at:6.2f}s] #{stream.number} {text}", flush=True)


class LiveView:
    """A panel a stream, redrawn while tokens arrive. For terminals."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._streams: dict[int, Stream] = {}
        self._live = Live(get_renderable=self._draw, refresh_per_second=12, console=Console())

    def __enter__(self) -> LiveView:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, value, trace)

    def joins(self, stream: Stream, at: float) -> None:
        with self._lock:
            stream.is_running = True
            self._streams[stream.number] = stream

    def text(self, stream: Stream, at: float, text: str) -> None:
        return  # drawn from stream.text at the next refresh

    def leaves(self, stream: Stream, at: float) -> None:
        with self._lock:
            stream.is_running = False

    def _draw(self) -> Group:
        with self._lock:
            streams = [self._streams[number] for number in sorted(self._streams)]
        num_running = sum(stream.is_running for stream in streams)
        panels = [
            Panel(
                Text(stream.error or stream.text[-SHOWN_CHARACTERS:], style="red" if stream.error else ""),
                title=f"#{stream.number}  {stream.num_output_tokens} tokens  {'runs' if stream.is_running else 'left'}",
                title_align="left",
                border_style="green" if stream.is_running else "dim",
            )
            for stream in streams
        ]
        return Group(Text(f"{num_running} requests in the batch", style="bold"), *panels)


def print_table(streams: list[Stream]) -> None:
    """Figures of each stream and of all together, as the client measured them."""
    table = Table(title="as the client saw it")
    for heading in ("request", "prompt tokens", "output tokens", "TTFT ms", "ITL mean ms", "ITL p99 ms", "tokens/s"):
        table.add_column(heading, justify="right")
    for stream in streams:
        gaps = stream.inter_token_ms or [float("nan")]
        table.add_row(
            f"#{stream.number}",
            str(stream.num_input_tokens),
            str(stream.num_output_tokens),
            f"{stream.ttft_ms:.0f}",
            f"{np.mean(gaps):.1f}",
            f"{np.percentile(gaps, 99):.1f}",
            f"{stream.tokens_per_s:.1f}",
        )
    begun = min(stream.started_at for stream in streams)
    ended = max(stream.arrivals[-1][0] for stream in streams)
    num_tokens = sum(stream.num_output_tokens for stream in streams)
    Console(width=None if Console().is_terminal else 100).print(table)
    print(
        f"total: {num_tokens} tokens in {ended - begun:.2f} s = {num_tokens / (ended - begun):.1f} tokens/s", flush=True
    )
