"""The progress bar of `LLM.generate`: prompts that have ended, and tokens a second."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(num_prompts: int, is_wanted: bool) -> Iterator[Callable[[int, int], None]]:
    """Gives what is to be called with (prompts that have ended since the last call, output tokens so far)."""
    if not is_wanted or not num_prompts or not sys.stderr.isatty():
        yield lambda _num_ended, _num_tokens: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]:,.0f} tokens/s"))
    begun = time.monotonic()
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task("prompts", total=num_prompts, rate=0.0)

        def advance(num_ended: int, num_tokens: int) -> None:
            rate = num_tokens / max(time.monotonic() - begun, 1e-9)
            bar.update(task, advance=num_ended, rate=rate)

        yield advance
