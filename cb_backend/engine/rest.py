"""When a model sleeps, wakes and changes its weights: a state, and what is done about it between steps.

It falls asleep after `idle_sleep_s` without a request, when it is told to, or, at the end of its turn, for another
model that waits for the card; whoever runs then goes on to the end first, and nobody new starts. The first request
wakes it; where its weights are not there any more, it stays asleep and its requests end with the reason, until they are
back or an update brings others.
How memory goes and comes is the sleeper's business, and who else wants the card that of `card_turns`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from cb_backend.contracts.errors import CbError
from cb_backend.contracts.rest import (
    ASLEEP,
    AWAKE,
    FALLING_ASLEEP,
    UPDATING,
    WAKING,
    NoRoomError,
    RestAnswer,
    RestStats,
    Sleeper,
    SleepLog,
    WeightsGoneError,
)
from cb_backend.engine.card_turns import CardTurns
from cb_backend.engine.rest_orders import Answer, Order, Orders, answer_all
from cb_backend.engine.scheduler.scheduler import Scheduler
from cb_backend.engine.weight_update import WeightUpdates
from cb_backend.support.fault_points import reach

COMPLAINT_INTERVAL_S = 10.0
POLITE_S = 0.5  # that a model which works leaves to those that do not, to make room first

logger = logging.getLogger("cb_backend.engine")


class Rest:
    """Of one engine. `turn` is called between steps, again and again."""

    def __init__(
        self,
        sleeper: Sleeper,
        scheduler: Scheduler,
        turns: CardTurns,
        log: SleepLog,
        *,
        idle_sleep_s: float,
        turn_s: float,
        fail: Callable[[Sequence[int], str], None],
        keep: Callable[[str], None] = lambda weights: None,
        tell: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`idle_sleep_s` 0: not by itself. `fail` ends waiting requests, by their ids, with a reason. `keep` is told
        the folder of the weights that are served whenever that changes, `tell` is called where a turn takes long."""
        self.state = AWAKE
        self._sleeper, self._scheduler, self._turns = sleeper, scheduler, turns
        self._idle_sleep_s, self._turn_s = idle_sleep_s, turn_s
        self._log, self._fail, self._tell, self._clock = log, fail, tell, clock
        self._idle_since = self._awake_since = clock()
        self._since = clock()  # in this state
        self._orders = Orders()
        self._is_for_another = False  # falling asleep at the end of a turn
        self._is_prepared = False
        self._is_filled = True  # False: awake, or nearly, without weights, which an update brings
        self._weights = WeightUpdates(sleeper, scheduler.gate, keep, tell)
        self._num_sleeps = self._num_wakes = 0
        self._asleep_seconds = self._wake_seconds = 0.0
        self._next_complaint = 0.0
        turns.take(sleeper.held_bytes)

    # ---- asked for --------------------------------------------------------------------------------------------------

    def ask_sleep(self, answer: Answer, deadline: float | None = None) -> None:
        """`deadline`, here and below: when it is called off and answered so, if it has not begun."""
        self._orders.add_sleep(Order(answer, deadline), self.state)

    def ask_wake(self, answer: Answer, deadline: float | None = None) -> None:
        self._orders.add_wake(Order(answer, deadline), self.state)

    def ask_update(self, folder: Path, answer: Answer, deadline: float | None = None) -> None:
        """What is wrong with the folder is answered at once."""
        try:
            self._sleeper.check_update(folder)
        except (CbError, OSError) as error:
            answer(RestAnswer(self.state, str(error)))
            return
        self._orders.update.append(Order(answer, deadline, folder))

    def call_off(self, answer: Answer) -> None:
        """Whoever is answered so waits no more: what it asked for and has not begun is answered so, and never done."""
        self._orders.call_off(answer, self.state, is_update_begun=not self._is_filled)

    def stats(self) -> RestStats:
        is_asleep = self.state in (ASLEEP, WAKING)
        return RestStats(
            state=self.state,
            num_sleeps=self._num_sleeps,
            num_wakes=self._num_wakes,
            asleep_seconds=self._asleep_seconds + (self._clock() - self._since if is_asleep else 0.0),
            wake_seconds=self._wake_seconds,
            num_updates=self._weights.num_done,
            held_bytes=self._sleeper.held_bytes,
            weights=self._sleeper.weights,
            update=self._orders.next_update,
        )

    # ---- between steps ----------------------------------------------------------------------------------------------

    def turn(self) -> bool:
        """Do what is due. Whether steps may run now. Raises `GaveUpError`, and whatever the sleeper raises."""
        if self._orders:
            self._orders.expire(self._clock(), self.state, is_update_begun=not self._is_filled)
        if self.state == AWAKE:
            self._while_awake()
        if self.state == FALLING_ASLEEP:
            self._while_falling_asleep()
        elif self.state == UPDATING:
            self._while_updating()
        elif self.state == ASLEEP:
            self._while_asleep()
        if self.state == WAKING:
            self._while_waking()
        return self.state not in (ASLEEP, WAKING) and self._is_filled

    @property
    def is_draining(self) -> bool:
        """Whether those who wait do so for something that ends by itself."""
        return self._scheduler.gate.is_closed

    def idle_poll_ms(self, most: int) -> int:
        """How long the loop may wait for a message while there are no requests."""
        if self.state in (WAKING, FALLING_ASLEEP, UPDATING) or self._orders.update or self._orders.wake:
            return 0
        if self.state == ASLEEP:
            return most
        if not self._is_prepared or self._orders.sleep:
            return 1
        left = self._idle_since + self._idle_sleep_s - self._clock() if self._idle_sleep_s else most
        return max(min(most, 50, int(1000 * left)), 1)  # who wants the card is looked for as often

    @property
    def poll_ms(self) -> int:
        """How long the loop may wait for a message while steps may not run."""
        return 1 if self.state == WAKING else 10 if self._has_reason_to_wake else 0

    def _while_awake(self) -> None:
        now, scheduler, orders = self._clock(), self._scheduler, self._orders
        is_idle = not scheduler.has_unfinished()
        if not is_idle:
            self._idle_since = now
        answer_all(orders.wake, RestAnswer(self.state))
        if orders.update:
            self._go_to(UPDATING)
            scheduler.gate.close()
            return
        asked = self._turns.asked
        if is_idle and (asked is not None or orders.sleep or self._is_time(now)):
            self._fall_asleep(is_for_another=asked is not None)
        elif asked is not None and (
            asked.is_at_once or now >= max(self._awake_since + self._turn_s, asked.since + POLITE_S)
        ):
            self._fall_asleep(is_for_another=True)
        elif is_idle and not self._is_prepared:
            self._is_prepared = self._sleeper.prepare()

    def _is_time(self, now: float) -> bool:
        return self._idle_sleep_s > 0 and now - self._idle_since >= self._idle_sleep_s

    def _fall_asleep(self, is_for_another: bool) -> None:
        self._is_for_another = is_for_another
        if is_for_another:  # else a request is reason enough to stay awake
            self._scheduler.gate.close()
        self._go_to(FALLING_ASLEEP)

    def _while_falling_asleep(self) -> None:
        scheduler = self._scheduler
        if self._orders.update or not self._is_sleep_wanted:
            scheduler.gate.open()
            self._idle_since = self._clock()
            self._go_to(AWAKE)
        elif scheduler.gate.num_running:
            return
        elif not self._is_prepared:
            self._is_prepared = self._sleeper.prepare()
        else:
            self._sleep()

    @property
    def _is_sleep_wanted(self) -> bool:
        """Who waited for the card may have it, or be gone; an order may be called off, or followed by another."""
        if self._is_for_another:
            return self._turns.asked is not None
        is_told = bool(self._orders.sleep) or self._is_time(self._clock())
        return is_told and not (self._orders.wake or self._scheduler.has_unfinished())

    def _sleep(self) -> None:
        begin = self._clock()
        reach("rest.sleep")
        self._scheduler.gate.forget_cache()
        self._sleeper.sleep(self._tell)
        self._scheduler.gate.open()
        self._turns.rest()
        self._num_sleeps += 1
        self._go_to(ASLEEP)
        logger.info("asleep, after %.2f s; the first request wakes it", self._clock() - begin)
        answer_all(self._orders.sleep, RestAnswer(self.state))

    @property
    def _has_reason_to_wake(self) -> bool:
        return self._scheduler.has_unfinished() or bool(self._orders.wake or self._orders.update)

    def _while_asleep(self) -> None:
        answer_all(self._orders.sleep, RestAnswer(self.state))
        if not self._has_reason_to_wake:
            self._turns.rest()  # who wanted to wake it may have gone
            return
        # Who has begun ends on the weights that it began with; for nobody else are they brought back before an update.
        is_filled = not self._orders.update or self._scheduler.gate.num_begun > 0
        try:
            if is_filled and not self._turns.is_in_line:
                self._sleeper.check_wake()
            self._turns.want(self._sleeper.needed_bytes)
            if not self._turns.try_take():
                return
            begin = self._clock()
            reach("rest.wake")
            self._sleeper.wake(self._tell, is_filled)
        except NoRoomError as error:
            self._turns.put_back()
            self._complain(error)
            return
        except WeightsGoneError as error:
            self._turns.rest()
            self._cannot_wake(str(error))
            return
        self._turns.take(self._sleeper.held_bytes)
        self._is_filled = is_filled
        self._asleep_seconds += begin - self._since
        self._log.slept(self._since, begin)
        self._go_to(WAKING)
        self._since = begin

    def _cannot_wake(self, problem: str) -> None:
        """Nobody waits for weights that are gone, but those whom an update serves."""
        logger.error("%s", problem)
        gate, is_updated = self._scheduler.gate, bool(self._orders.update)
        self._fail(gate.begun_waiting if is_updated else gate.waiting, problem)
        if not is_updated:
            answer_all(self._orders.wake, RestAnswer(self.state, problem))

    def _while_waking(self) -> None:
        if not self._sleeper.is_awake:
            return
        seconds = self._clock() - self._since
        self._num_wakes += 1
        self._wake_seconds += seconds
        self._awake_since = self._idle_since = self._clock()
        logger.info("awake after %.2f s", seconds)
        if not self._is_filled:
            self._scheduler.gate.close()
            self._go_to(UPDATING)
            return
        self._go_to(AWAKE)
        answer_all(self._orders.wake, RestAnswer(self.state, "", seconds))

    def _while_updating(self) -> None:
        gate, updates = self._scheduler.gate, self._orders.update
        if gate.num_begun and updates:
            return
        if updates:
            self._update(updates.pop(0))
        self._idle_since = self._clock()
        gate.open()
        self._go_to(AWAKE)

    def _update(self, order: Order) -> None:
        begin = self._clock()
        problem = self._weights.do(order.folder, self._is_filled)
        self._is_filled = True
        seconds = self._clock() - begin
        if not problem:
            logger.info("weights of %s are served, after %.2f s", order.folder, seconds)
        order.answer(RestAnswer(AWAKE, problem, seconds))

    # ---- little things ----------------------------------------------------------------------------------------------

    def _go_to(self, state: str) -> None:
        self.state, self._since = state, self._clock()

    def _complain(self, error: NoRoomError) -> None:
        if self._clock() >= self._next_complaint and not self._turns.is_taken:  # nobody will make any
            self._next_complaint = self._clock() + COMPLAINT_INTERVAL_S
            logger.warning("it cannot wake yet, and waits for memory: %s", error)
