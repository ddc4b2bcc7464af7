"""One simulated world as plain data: an engine, what comes to it, and what befalls it. It can be kept as JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import msgspec

from cb_backend.contracts.config import EngineConfig
from cb_backend.contracts.pooling import Pooling, PoolingRules
from cb_backend.contracts.request_params import RequestParams
from cb_backend.contracts.scheduling import SchedulingParams
from cb_backend.contracts.token_rules import TokenRules

STEP_TRAITS = ("copies out", "copies in", "is relied on", "has lost a row")
CANCEL_STATES = ("compiling", "waiting", "prefilling", "decoding", "preempted", "swapped", "ended")


@dataclass(frozen=True)
class Arrival:
    """One request: when it comes, what it asks, and what befalls it."""

    request_id: int
    at_step: int
    prompt: tuple[int, ...]
    params: RequestParams
    scheduling: SchedulingParams = field(default_factory=SchedulingParams)
    fails_at: int | None = None  # its row fails once this many tokens are known
    cancel_at: int | None = None  # step of a cancel, whatever the request is doing
    adapter: str = ""  # its path, which says what it is (`adapters`); empty: none
    cancel_in: str | None = None  # state in which it is cancelled, of `CANCEL_STATES`
    pooling: Pooling | None = None  # a vector is wanted, and no tokens

    @property
    def rules(self) -> TokenRules:
        """What the engine is told of the one answer."""
        rules = self.params.token_rules()[0]
        return rules if self.pooling is None else TokenRules(seed=0, pooling=PoolingRules(pooling=self.pooling))


@dataclass(frozen=True)
class Fault:
    """A fault point raises at its n-th time, and then `times` - 1 times more.

    With `step` (of `STEP_TRAITS`), for "engine.execute" and "engine.result": only steps like that are counted.
    """

    point: str
    nth: int
    times: int = 1
    step: str | None = None


@dataclass(frozen=True)
class Scenario:
    seed: int
    config: EngineConfig
    num_blocks: int  # null block included
    max_model_len: int
    vocab_size: int
    stop_chance: float
    is_delayed: bool
    num_host_blocks: int
    step_s: float  # time that passes from round to round
    arrivals: tuple[Arrival, ...]
    faults: tuple[Fault, ...] = ()
    engine_dies_at: int | None = None  # step
    front_end_dies_at: int | None = None  # step at which front end 1 is gone, and all its clients
    resets_cache_at: int | None = None  # step
    windows: tuple[int, ...] = (0,)  # of each group of layers
    num_adapter_slots: int = 0
    rank_dies_at: int | None = None  # step at which rank 1 of two is gone (`config.tensor_parallel_size` is 2)
    is_static: bool = False  # batches are filled, and then run until all in them have ended

    @cached_property
    def num_cache_tokens(self) -> int:
        """Of the longest request that the whole cache can hold."""
        size, most = self.config.block_size, 1 << 20
        if self.windows == (0,):
            return (self.num_blocks - 1) * size
        if self.most_blocks(most) < self.num_blocks:
            return most * size  # from some length on a request takes no more
        return next(rows for rows in range(most) if self.most_blocks(rows + 1) >= self.num_blocks) * size

    def most_blocks(self, num_rows: int) -> int:
        """What a request of so many rows holds at most: in a group with a window, what the window before a block's
        first token fills, and what all steps on their way fill from its last token on."""
        config = self.config
        in_flight = (1 + self.run_ahead) * config.max_num_batched_tokens
        total = 0
        for window in self.windows:
            rows = -((1 - max(window, 2)) // config.block_size) - (
                (1 - config.block_size - in_flight) // config.block_size
            )
            total += min(num_rows, rows) if window and config.enable_chunked_prefill else num_rows
        return total

    @property
    def run_ahead(self) -> int:
        return self.config.run_ahead or 0

    def save(self, path: Path) -> None:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")

    @classmethod
    def load(cls, path: Path) -> Scenario:
        return msgspec.json.decode(path.read_bytes(), type=cls)
