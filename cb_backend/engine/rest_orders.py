"""What a model is told about its rest: orders that wait until they are done, or until whoever gave them gives up.

An order that is not done by its deadline, or is called off, is answered, and never done afterwards: nothing happens
that nobody waits for.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from cb_backend.contracts.rest import ASLEEP, FALLING_ASLEEP, WAKING, RestAnswer

Answer = Callable[[RestAnswer], None]

_HELD_UP = "requests that run, or another model's turn, held it up until its time was over; it will not happen any more"
_CALLED_OFF = "it was called off before it began"


class Order(NamedTuple):
    answer: Answer  # equal for the orders of one who gives several
    deadline: float | None = None  # of the owner's clock; None: it waits for ever
    folder: Path = Path()  # of an update


class Orders:
    """Of one engine, each kind in the order of their coming."""

    def __init__(self) -> None:
        self.sleep: list[Order] = []
        self.wake: list[Order] = []
        self.update: list[Order] = []

    def __len__(self) -> int:
        return len(self.sleep) + len(self.wake) + len(self.update)

    @property
    def next_update(self) -> str:
        """The folder that is to be served next; empty: no other."""
        return str(self.update[0].folder) if self.update else ""

    def add_sleep(self, order: Order, state: str) -> None:
        """It calls off a wake that has not begun. `state`: of the model, now."""
        if state in (FALLING_ASLEEP, ASLEEP):
            answer_all(self.wake, RestAnswer(state, "it was told to sleep meanwhile"))
        self.sleep.append(order)

    def add_wake(self, order: Order, state: str) -> None:
        """It calls off a sleep that has not begun."""
        answer_all(self.sleep, RestAnswer(state, "it was told to wake meanwhile"))
        self.wake.append(order)

    def expire(self, now: float, state: str, is_update_begun: bool) -> None:
        """Answer and forget those whose time is over, but not what is being done already: the first update, where it
        has begun, and every wake where the model is waking."""
        problem = RestAnswer(state, _HELD_UP)
        self._end(lambda each: each.deadline is not None and now >= each.deadline, problem, is_update_begun)

    def call_off(self, answer: Answer, state: str, is_update_begun: bool) -> None:
        """Likewise those that are answered so."""
        self._end(lambda each: each.answer == answer, RestAnswer(state, _CALLED_OFF), is_update_begun)

    def _end(self, is_over: Callable[[Order], bool], problem: RestAnswer, is_update_begun: bool) -> None:
        num_wakes = len(self.wake) if is_update_begun or problem.state == WAKING else 0  # an update wakes it too
        for orders, num_begun in ((self.sleep, 0), (self.wake, num_wakes), (self.update, int(is_update_begun))):
            others = orders[num_begun:]
            orders[num_begun:] = [each for each in others if not is_over(each)]
            answer_all([each for each in others if is_over(each)], problem)


def answer_all(orders: list[Order], answer: RestAnswer) -> None:
    """Each once, and forget them."""
    while orders:
        orders.pop(0).answer(answer)
