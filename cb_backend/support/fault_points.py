"""Named places where something may go wrong, so that tests can make it go wrong there, at the n-th time.

Nothing is armed outside tests; a point that is reached then costs one comparison. What a failure at a point means for
the requests is the business of the code around it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

POINTS = (
    # a request comes or goes
    "engine.make_request",
    "scheduler.add_request",
    "scheduler.cancel",
    "scheduler.expire",
    # a plan is made
    "scheduler.schedule",
    "preemption.preempt",
    "kv.allocate_slots",
    "kv.append_blocks",
    "swap.put_out",
    "swap.bring_in",
    "slots.join",
    "plan.launch",
    # a step is run and its result taken in
    "engine.execute",
    "engine.result",
    "results.complete",
    "kv.cache_full_blocks",
    "results.leave",
    # what travels between the processes
    "process.handle",
    "process.send_output",
    "process.stats",
    "front_end.deliver",
    "front_end.text",
)

_hook: Callable[[str], None] | None = None


def reach(name: str) -> None:
    """The code has come to a point. Raises what the test that armed it raises."""
    if _hook is not None:
        _hook(name)


@contextmanager
def armed(hook: Callable[[str], None]) -> Iterator[None]:
    """Call `hook` with the name of every point that is reached in this block. For one thread of one test."""
    global _hook
    _hook = hook
    try:
        yield
    finally:
        _hook = None
