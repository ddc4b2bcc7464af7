"""What a replay sends: prompts, when they arrive, how long each answer is, and how long its client lets it be.

The length of an answer is not told to the engine: a client allows `max_tokens`, and the answer ends when it ends. So
a scheduler that knows all lengths beforehand gets no advantage here that it would not have in life.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from cb_backend.contracts.errors import ConfigError
from cb_backend.traffic.prompts import prompts_of
from cb_backend.traffic.workload import PlannedRequest


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests, numbered from 0. All lists have an entry a request."""

    prompts: list[NDArray[np.int32]]  # each [num_prompt_tokens]
    output_lens: list[int]  # tokens after which the answer ends
    max_tokens: list[int]  # what the client allows, at least as much
    arrivals: list[float]  # seconds after the start

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def prompt_lens(self) -> list[int]:
        return [len(prompt) for prompt in self.prompts]

    @property
    def num_output_tokens(self) -> int:
        return sum(self.output_lens)

    def at_once(self) -> Traffic:
        """The same with everything there at the start."""
        return replace(self, arrivals=[0.0] * len(self))

    def at_rate(self, requests_per_s: float) -> Traffic:
        """The same with all gaps scaled so that so many come in a second on average."""
        last = max(self.arrivals, default=0.0)
        if last <= 0:
            raise ConfigError("requests that are all there at once have no rate")
        factor = (len(self) - 1) / requests_per_s / last
        return replace(self, arrivals=[arrival * factor for arrival in self.arrivals])

    def with_known_lengths(self) -> Traffic:
        """The same where clients allow exactly as many tokens as will come."""
        return replace(self, max_tokens=list(self.output_lens))


def traffic_of(
    requests: Sequence[PlannedRequest], vocab_size: int, max_tokens: int | None = None, seed: int = 0
) -> Traffic:
    """Planned requests as traffic, their prompts drawn from ids below `vocab_size` - 1.

    `max_tokens`: what every client allows; None: as much as the longest answer. Raises `ConfigError` if it is less.
    """
    longest = max(request.num_output_tokens for request in requests)
    if max_tokens is not None and max_tokens < longest:
        raise ConfigError(f"an answer of {longest} tokens is longer than the {max_tokens} that clients allow")
    return Traffic(
        prompts_of(requests, vocab_size - 1, seed),
        [request.num_output_tokens for request in requests],
        [max_tokens or longest] * len(requests),
        [request.scheduled_s for request in requests],
    )
