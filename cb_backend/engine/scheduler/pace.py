"""How many prompt tokens may ride along with running streams (`max_itl_ms`), by step times learned while serving.

What is known is `StepTimeModel`'s. This module has no clock: times are told to it, where there is a limit. While the
host launches a step, nobody reads the results of those before it. A step that was done meanwhile has a time that is not
known, so it is not learned from: else the time of launching a large step would count as that of the small one whose
result came next, and the large one would seem to take next to nothing. Launching has a limit of its own
(`large_steps`).
"""

from __future__ import annotations

import math
from collections import deque

import msgspec
import numpy as np
from numpy.typing import NDArray

from cb_backend.contracts.step import StepPlan
from cb_backend.engine.scheduler.large_steps import LargeSteps, is_large
from cb_backend.engine.scheduler.step_time_model import NUM_TRIALS, StepTimeModel
from cb_backend.engine.step_shapes import MOST_SMALL_TOKENS

MIN_PREFILL_TOKENS = 16  # a step's prompt tokens even where the limit leaves no room: prompts must go on
_FIRST_TRIAL_TOKENS = 64
_MOST_GROWTH = 2  # times the most tokens seen so far: the fit is not trusted far outside what it has seen
_LEARNED_AT_ONCE = 256  # steps
_WAITED_SHARE = 8  # who waited for a result, one part in so many of a large launch or longer, saw the step's end


class StepWork(msgspec.Struct, frozen=True, gc=False):
    """What of a plan its time depends on. The plan itself is not kept: hundreds of them would drive out of the
    processor's caches what the next steps need."""

    step_id: int
    num_tokens: int
    num_pairs: float
    has_decode: bool
    has_prefill: bool
    is_large: bool


class Pace:
    """Learns how long steps take, and keeps those that carry running streams below a time limit, if there is one, by
    the number of prompt tokens in them.

    Where nobody asks after every step, many are learned from at once: that costs a step a tenth.
    """

    def __init__(self, max_itl_ms: float | None) -> None:
        self._limit_s = math.inf if max_itl_ms is None else max_itl_ms / 1000
        self.has_limit = self._limit_s < math.inf
        self._most_seen = _FIRST_TRIAL_TOKENS // _MOST_GROWTH
        self._launched: deque[tuple[StepWork, float]] = deque()  # and when
        self._unlearned: list[tuple[StepWork, float]] = []  # and the seconds that it took
        self._last_end = -math.inf
        self._model = StepTimeModel()
        self.large_steps = LargeSteps(self._limit_s)
        self._launch_end = -math.inf  # of the last launch
        self._last_large, self._large_launch_s = 0, 0.0  # step_id of the last large step, seconds of its launch
        self._was_end_seen = True  # of the step that came back last
        # Slots and pairs of the last plan, if it was one of decode rows alone.
        self._decode_slots: NDArray[np.int32] | None = None
        self._decode_pairs = 0.0

    @property
    def model(self) -> StepTimeModel:
        """What is known by now."""
        if self._unlearned:
            self._learn()
        return self._model

    def launched(self, plan: StepPlan, now: float) -> None:
        """A step has been planned."""
        num_tokens = num_decode = plan.num_decode_rows
        has_prefill = num_decode < plan.num_rows
        if plan.slots is self._decode_slots and not has_prefill:  # the last plan's rows, each one token further
            num_pairs = self._decode_pairs + num_decode
        else:
            num_pairs = int(np.add.reduce(plan.first[:num_decode])) + num_decode / 2
        if has_prefill:
            chunks = zip(plan.first[num_decode:].tolist(), plan.num_tokens[num_decode:].tolist(), strict=True)
            for first, count in chunks:
                num_tokens += count
                num_pairs += count * (first + count / 2)
        self._decode_slots, self._decode_pairs = None if has_prefill else plan.slots, num_pairs
        is_big = has_prefill and is_large(plan.num_rows - num_decode, num_tokens - num_decode)
        work = StepWork(plan.step_id, num_tokens, num_pairs, num_decode > 0, has_prefill, is_big)
        self._launched.append((work, now))

    def launch_ended(self, now: float) -> None:
        """The step that was planned last is launched. Told where there is a limit."""
        work, begin = self._launched[-1]
        seconds = now - (begin if begin > self._launch_end else self._launch_end)
        self._launch_end = now
        if work.is_large:
            self.large_steps.launched(seconds)
            if len(self._launched) > 1:  # alone, it held up no result but its own
                self._last_large, self._large_launch_s = work.step_id, seconds

    def completed(self, step_id: int, now: float) -> None:
        """The step's result has come: it took the time since its launch, or since the end of the one before."""
        work, begin = self._launched.popleft()
        while work.step_id < step_id:  # which did not come back
            work, begin = self._launched.popleft()
        seconds = now - (begin if begin > self._last_end else self._last_end)
        if step_id <= self._last_large and not self._was_seen(now):
            seconds = self._most_seconds(work, seconds)
        self._last_end = now
        if seconds > 0:
            self._unlearned.append((work, seconds))
            if len(self._unlearned) >= _LEARNED_AT_ONCE:
                self._learn()

    def _most_seconds(self, work: StepWork, seconds: float) -> float:
        """What a step of which neither begin nor end were seen took at most, if that is less than expected: else what
        is expected too long of large steps would stay so for as long as the host is busy launching them. 0.0: not
        known. A large one's device was done by the end of the next launch, and began no earlier than a launch before.
        """
        if self._launch_end <= self._last_end or not work.is_large:
            return 0.0
        self._most_seen = max(self._most_seen, work.num_tokens)  # a device that keeps up is not far off the fit
        expected = self.model.seconds(work.num_tokens, work.num_pairs)
        return 2 * seconds if 2 * seconds < expected else 0.0

    def _was_seen(self, now: float) -> bool:
        """Whether begin and end of the step that has come back are known, though a large one was launched meanwhile:
        its result, and the one before, were waited for."""
        was_begin_seen = self._was_end_seen
        self._was_end_seen = _WAITED_SHARE * (now - self._launch_end) >= self._large_launch_s
        return was_begin_seen and self._was_end_seen

    def _learn(self) -> None:
        num_tokens, num_pairs, seconds = np.array(
            [(work.num_tokens, work.num_pairs, seconds) for work, seconds in self._unlearned]
        ).T
        has_prefill = np.array([work.has_prefill for work, _ in self._unlearned])
        self._unlearned = []
        self._model.observe(num_tokens, num_pairs, has_prefill, seconds)
        self._most_seen = max(self._most_seen, int(num_tokens[has_prefill].max(initial=0)))

    def most_prefill_tokens(self, num_decode: int, num_decode_pairs: float, position: int) -> int:
        """Prompt tokens that may be computed beside `num_decode` running rows; the first has that position.

        Only where there is a limit.
        """
        model = self.model
        most = max(MIN_PREFILL_TOKENS, _MOST_GROWTH * self._most_seen)
        if model.num_prefill_samples < NUM_TRIALS:
            return min(most, _FIRST_TRIAL_TOKENS)
        a, b, c = model.coefficients()
        limit_s = self._limit_s / (1 + 2 * min(model.relative_error, 0.5))
        left_s = limit_s - a - b * num_decode - c * num_decode_pairs
        if left_s <= 0:
            return MIN_PREFILL_TOKENS
        linear = b + c * position  # n tokens cost linear * n + c / 2 * n^2
        root = linear + math.sqrt(linear * linear + 2 * c * left_s)
        num_tokens = 2 * left_s / root if root > 0 else math.inf
        return max(MIN_PREFILL_TOKENS, int(min(num_tokens, most)))

    @property
    def holds_up_last_tokens(self) -> bool:
        """Whether a large step would, though none of the streams is in it: those that end with launched steps still
        wait for these to be read."""
        return self.large_steps.are_barred and any(work.has_decode for work, _ in self._launched)

    def must_be_small(self, num_decode: int, num_decode_pairs: float, most: int) -> bool:
        """Whether a step beside running rows, of at most `most` prompt tokens, is to be a small one: streams cannot
        bear that a large one is launched, or prompts get on faster without, as the device would wait for the host.
        """
        if not self.large_steps.may_come():
            return True
        launch_s = self.large_steps.launch_seconds
        if most <= MOST_SMALL_TOKENS or not launch_s:
            return False
        if most >= _MOST_GROWTH * self._most_seen:
            return False  # what even larger ones gain is not known before this one is
        # What prompt tokens look at costs the same in either.
        large_s, small_s = (
            self.model.seconds(num_decode + number, num_decode_pairs) for number in (most, MOST_SMALL_TOKENS)
        )
        return most * small_s < MOST_SMALL_TOKENS * max(large_s, launch_s)

    def shares_by_draining(self, num_decode: int, num_decode_pairs: float, most: int) -> tuple[float, float]:
        """What a step of `most` prompt tokens alone before each mixed one changes.

        Returns (share of the time for a prompt token that is saved, share of the time between two tokens of a stream
        that is lost by it). (0, 0): nothing, or not known yet.
        """
        if self.model.num_prefill_samples < NUM_TRIALS:
            return 0.0, 0.0
        num_mixed = self.most_prefill_tokens(num_decode, num_decode_pairs, 0)
        if self.large_steps.are_barred:
            num_mixed = min(num_mixed, MOST_SMALL_TOKENS)
        num_alone = min(most, _MOST_GROWTH * self._most_seen)
        if num_alone <= num_mixed:
            return 0.0, 0.0
        alone_s = self.model.seconds(num_alone, num_alone * num_alone / 2)
        mixed_s = self.model.seconds(num_decode + num_mixed, num_decode_pairs + num_mixed * num_mixed / 2)
        if alone_s <= 0 or mixed_s <= 0:
            return 0.0, 0.0
        per_token_s = (alone_s + mixed_s) / (num_alone + num_mixed)
        return max(1 - per_token_s * num_mixed / mixed_s, 0.0), alone_s / (alone_s + mixed_s)
