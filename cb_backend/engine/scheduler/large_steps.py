"""Whether running streams can bear that a large step is launched: how long the host needs for that, learned by serving.

A step with more prompts than any small graph has room for is, unless it is full, launched kernel by kernel. That takes
the host about as long whatever the step's size (10 ms and more where the model has many layers), and meanwhile nobody
reads results: streams wait for as long, however little the device has to do. So this is no matter of tokens, and no
fit of step times can tell it: large steps are barred as a whole while launching one takes longer than the limit. Steps
beside streams are small ones then. This module has no clock: times are told to it.
"""

from __future__ import annotations

import statistics
from collections import deque

from cb_backend.engine.step_shapes import MOST_SMALL_PROMPTS, MOST_SMALL_TOKENS

_REMEMBERED = 8  # launches
# One of them may be slow: a pause of the host, kernels that come in. The second bars.
_FORGIVEN = 1
# Steps beside streams from one trial to the next while large ones are barred. What a trial costs is one wait in so
# many: few enough to leave the 99th percentile where it is.
_TRIAL_EVERY = 256


def is_large(num_prompts: int, num_prompt_tokens: int) -> bool:
    """Whether a step with so many may have to be launched kernel by kernel."""
    return num_prompts > MOST_SMALL_PROMPTS or num_prompt_tokens > MOST_SMALL_TOKENS


class LargeSteps:
    """Told of every launch of a large step, and asked before each step beside streams."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._seconds: deque[float] = deque(maxlen=_REMEMBERED)  # of the last launches
        self._num_waited = 0  # steps since large ones were barred, or last tried

    @property
    def are_barred(self) -> bool:
        """One that was quick again ends it, and the next slow one brings it back at once."""
        seconds, limit_s = self._seconds, self._limit_s
        return bool(seconds) and seconds[-1] > limit_s and sum(each > limit_s for each in seconds) > _FORGIVEN

    @property
    def launch_seconds(self) -> float:
        """That launching one usually takes; 0.0: none has been launched yet."""
        return statistics.median(self._seconds) if self._seconds else 0.0

    def launched(self, seconds: float) -> None:
        """Launching one took the host so long."""
        self._seconds.append(seconds)
        self._num_waited = 0

    def may_come(self) -> bool:
        """Whether the step that is planned now, beside streams, may be a large one."""
        if not self.are_barred:
            return True
        self._num_waited += 1
        return self._num_waited > _TRIAL_EVERY
