"""Random worlds, each the same for the same seed: scarce memory, shared prefixes, lengths at borders, faults."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

from cb_backend.contracts.config import EngineConfig
from cb_backend.contracts.request import make_request_id
from cb_backend.contracts.request_params import RequestParams
from cb_backend.contracts.scheduling import SchedulingParams
from cb_backend.contracts.structured_output import StructuredOutput
from cb_backend.support.fault_points import POINTS
from tests.simulation.adapters import SHARE as ADAPTERS_SHARE
from tests.simulation.adapters import with_adapters
from tests.simulation.grammars import SLOW_TURNS, make_grammar
from tests.simulation.ranks import with_ranks
from tests.simulation.scenario import CANCEL_STATES, Arrival, Fault, Scenario

LONGEST = 200  # tokens of a prompt
# Reached in few worlds, or after all requests have ended, so drawn more often.
# Points that few worlds come to, and seldom: they fail at the latest at this time.
_FEW_TIMES = {"preemption.preempt": 3, "swap.put_out": 2, "swap.bring_in": 2, "process.stats": 2, "scheduler.cancel": 3}
_RARE_POINTS = (
    *("preemption.preempt", "swap.put_out", "swap.bring_in") * 2,
    *("scheduler.cancel", "process.handle", "front_end.deliver", "scheduler.schedule"),
)
_RARE_STATES = (*("prefilling",) * 5, "preempted", "swapped", "compiling")


@dataclass(frozen=True)
class Kind:
    """Which worlds are drawn."""

    groups: tuple[int, ...] = ()  # a world's model has one of these numbers of groups of layers; empty: as drawn
    has_adapters: bool = False  # all have adapters; False: as many as are drawn with them
    has_ranks: bool = False  # all are over two ranks, and have no adapters; False: as many as are drawn so

    def __str__(self) -> str:
        groups = " or ".join(map(str, self.groups)) or "drawn"
        adapters = ", all with adapters" if self.has_adapters else ""
        return f"{groups}{adapters}{', all over two ranks' if self.has_ranks else ''}"


AS_DRAWN = Kind()


def make_scenario(seed: int, kind: Kind = AS_DRAWN) -> Scenario:
    """World number `seed`: as drawn, or the same with a model of so many groups of layers, the first of which keeps
    all, or with adapters, or over two ranks."""
    windows = _windows(seed)
    if kind.groups:
        num_groups = random.Random(f"groups of {seed}").choice(kind.groups)
        windows = (0, *[_window(random.Random(f"window of {seed}"))] * (num_groups - 1))
    world = with_windows(_draw(seed), windows)
    if kind.has_ranks:
        return with_ranks(world, 1.0)
    return with_ranks(with_adapters(world, 1.0 if kind.has_adapters else ADAPTERS_SHARE))


def with_pooling(scenario: Scenario) -> Scenario:
    """The same world, in which some of the requests want vectors: as many as makes streams stand beside them."""
    rng = random.Random(f"pooling of {scenario.seed}")
    share = rng.choice((0.2, 0.5, 0.9))
    arrivals = [
        replace(arrival, params=RequestParams(), pooling=rng.choice(("last", "last", "mean")))
        if rng.random() < share
        else arrival
        for arrival in scenario.arrivals
    ]
    config = scenario.config
    if config.enable_chunked_prefill and rng.random() < 0.5:  # many steps a prompt, so that it meets more
        config = replace(config, max_num_batched_tokens=rng.choice((3, 5)))
    return replace(scenario, arrivals=tuple(arrivals), config=config)


def with_windows(scenario: Scenario, windows: tuple[int, ...]) -> Scenario:
    """The same world, with a model of so many groups of layers, and a cache for as many tokens of one request."""
    if windows == (0,):
        return scenario
    num_tokens, num_groups = scenario.num_cache_tokens, len(windows)
    grouped = replace(scenario, windows=windows, num_host_blocks=scenario.num_host_blocks * num_groups)
    num_rows = -(-num_tokens // scenario.config.block_size)
    return replace(grouped, num_blocks=1 + grouped.most_blocks(num_rows))


def _windows(seed: int) -> tuple[int, ...]:
    """Of the groups of a model's layers: in half of the worlds one that keeps all, else mostly two or seven.

    Drawn apart, so that the rest of a world does not depend on them.
    """
    rng = random.Random(f"windows of {seed}")
    if rng.random() < 0.5:
        return (0,)
    window = _window(rng)
    others = tuple(sorted((rng.randint(1, 20) for _ in range(2)), reverse=True))
    return rng.choice(
        ((0, window), (0, window), (0, *[window] * 6), (0, *[window] * 6), (0, 0, window), (window,), others)
    )


def _window(rng: random.Random) -> int:
    return rng.choice((1, 2, 3, 4, rng.randint(1, 8), rng.randint(1, 40), 16))


def _draw(seed: int) -> Scenario:
    rng = random.Random(seed)
    # Two or three of the longest requests fit, so that company means scarcity; now and then there is plenty.
    is_scarce = rng.random() < 0.8
    giant = LONGEST if rng.random() < 0.3 else 60
    longest = rng.choice((rng.randint(4, 12), rng.randint(10, 40), rng.randint(10, 40), rng.randint(20, 100), giant))
    block_size = rng.choice([size for size in (1, 2, 2, 4, 4, 16) if not is_scarce or size <= max(longest // 4, 1)])
    num_cache_tokens = int(longest * rng.choice((1.0, 1.3, 1.6, *(() if is_scarce else (2.0, 3.0, 20.0))))) + block_size
    num_blocks = 1 + max(num_cache_tokens // block_size, 2)
    num_cache_tokens = (num_blocks - 1) * block_size
    max_model_len = rng.choice((num_cache_tokens, num_cache_tokens, num_cache_tokens, max(3, longest), 40))
    vocab_size = rng.choice((2, 3, 10, 200, 1000))
    longest = max(1, min(max_model_len, num_cache_tokens, longest) - 1)
    texts = [[rng.randrange(vocab_size) for _ in range(longest + 4)] for _ in range(rng.choice((1, 1, 2)))]
    classes = rng.choice(((0,), (0,), (-1, 0, 1), (0, 0, 0, -3), (-100, 5)))
    tenants = rng.choice((("",), ("",), ("a", "b", "c"), ("a", "a", "a", "b")))
    drawer = _ArrivalDrawer(rng, texts, longest, vocab_size, block_size, classes, tenants, is_scarce)
    arrivals = [drawer.draw(index) for index in range(rng.randint(8 if is_scarce else 4, 20))]
    num_faults = rng.choice((0, 0, 0, 1, 2))
    config, is_static = _config(rng, block_size, is_scarce, has_urgent=min(classes) < 0)
    return Scenario(
        seed=seed,
        config=config,
        is_static=is_static,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        stop_chance=rng.choice((0.0, 0.0, 0.02, 0.2)),
        is_delayed=rng.random() < 0.5,
        num_host_blocks=rng.choice((0, 16, 64, 64, 64)),
        step_s=rng.choice((0.0, 0.01, 0.01, 0.01, 0.01, 0.01 if is_scarce else 1.0)),
        arrivals=tuple(sorted(arrivals, key=lambda arrival: arrival.at_step)),
        faults=(*(_fault(rng) for _ in range(num_faults)), *_step_faults(seed)),
        engine_dies_at=rng.randint(1, 60) if rng.random() < 0.05 else None,
        front_end_dies_at=rng.randint(1, 40) if rng.random() < 0.1 else None,
        resets_cache_at=rng.randint(1, 40) if rng.random() < 0.2 else None,
    )


def _fault(rng: random.Random) -> Fault:
    point = rng.choice((*POINTS, *_RARE_POINTS))
    n = rng.choice((1, 2, rng.randint(1, 8), rng.randint(4, 20), rng.randint(1, 40)))
    return Fault(point, min(n, _FEW_TIMES.get(point, n)), rng.choice((1, 1, 1, 3)))


def _step_faults(seed: int) -> tuple[Fault, ...]:
    """Failures of just the steps on which more rests than their own rows. Nothing fails where there is no such step.

    Drawn apart, so that the rest of a world does not depend on them.
    """
    rng = random.Random(f"steps of {seed}")
    if rng.random() < 0.3:
        return (Fault("engine.result", 1, step="is relied on"),)
    if rng.random() < 0.85:
        return ()
    point = rng.choice(("engine.execute", "engine.result", "engine.result"))
    traits = ("copies out", "copies in") if point == "engine.execute" else ("copies out", "copies in", "has lost a row")
    return (Fault(point, rng.choice((1, 1, 2, 3, 5)), rng.choice((1, 1, 2)), rng.choice(traits)),)


def _config(rng: random.Random, block_size: int, is_scarce: bool, has_urgent: bool) -> tuple[EngineConfig, bool]:
    """And whether its batches are static."""
    is_chunking = rng.random() < 0.75
    max_itl_ms = rng.choice((None, None, 0.001, 20.0)) if is_chunking else None
    batch: dict[str, Any] = {
        "max_num_seqs": rng.choice((4, 8, 8, 16, 16) if is_scarce else (2, 4, 8, 16)),
        "max_num_batched_tokens": rng.choice((7, 16, 16, 64, 64, 512) if is_scarce else (1, 7, 16, 64, 64, 512)),
        "max_queue_size": rng.choice((3, 10, 1000, 1000, 1000)),
        "enable_prefix_caching": rng.random() < 0.85,
    }
    is_static = rng.random() < (0.0 if is_scarce else 0.12)
    config = EngineConfig(
        model="fake",
        block_size=block_size,
        enable_chunked_prefill=is_chunking,
        **batch,
        run_ahead=rng.randint(0, 4),
        max_itl_ms=max_itl_ms,
        prefill_policy=rng.choice(("mixed", "hybrid")) if max_itl_ms else "mixed",
        admission_reserve=-10.0 if is_scarce else rng.choice((-10.0, -10.0, 0.5)),
        max_queue_tokens=rng.choice((1 << 24, 1 << 24, 200)),
        priority_aging_s=rng.choice((0.0, 0.05, 10.0)),
        queue_timeout_ms=rng.choice((None, None, None, 10_000)),
        timeout_ms=rng.choice((None, None, None, 20_000)),
        reserved_share=rng.choice((0.0, 0.0, 0.3, 0.5) if has_urgent else (0.0,) * 9 + (0.3,)),
        watchdog_timeout_s=0.0,
    )
    return config, is_static


class _ArrivalDrawer:
    def __init__(
        self,
        rng: random.Random,
        texts: list[list[int]],
        longest: int,
        vocab_size: int,
        block_size: int,
        classes: tuple[int, ...],
        tenants: tuple[str, ...],
        is_scarce: bool,
    ) -> None:
        self.rng = rng
        self.texts = texts
        self.longest = longest
        self.vocab_size = vocab_size
        self.block_size = block_size
        self.classes = classes
        self.tenants = tenants
        self.is_scarce = is_scarce
        self.is_burst = rng.random() < 0.4
        self.has_grammars = rng.random() < 0.15

    def draw(self, index: int) -> Arrival:
        rng, vocab_size = self.rng, self.vocab_size
        most = max(self.longest, 2)
        many = rng.randint(most // 2, most)
        few = () if self.is_scarce else (1, rng.randint(1, most))
        max_tokens = rng.choice((*few, rng.randint(1, 8), many, many, many, most + 5))
        num_stop_ids = rng.choice((0, 0, 0, 1, min(2, vocab_size - 1)))
        at_step = 0 if self.is_burst and rng.random() < 0.8 else rng.randint(0, 40)
        prompt = self._prompt()
        is_cancelled = rng.random() < 0.25
        by_state = rng.random() < 0.7
        return Arrival(
            request_id=make_request_id(rng.randint(0, 2), index),
            at_step=at_step,
            prompt=prompt,
            params=RequestParams(
                max_tokens=max_tokens,
                min_tokens=rng.choice((0, 0, rng.randint(0, max_tokens))),
                stop_token_ids=tuple(rng.sample(range(vocab_size), k=num_stop_ids)),
                stop=self._stop_strings(),
                include_stop_str_in_output=rng.random() < 0.3,
                structured_output=self._grammar(),
                seed=1,
            ),
            scheduling=SchedulingParams(
                priority=rng.choice(self.classes),
                timeout_ms=rng.choice((*[None] * 8, 200, 5000)),
                queue_timeout_ms=rng.choice((*[None] * 8, 100, 3000)),
                cache_salt=rng.choice(("", "", "tenant")),
                tenant=rng.choice(self.tenants),
            ),
            fails_at=rng.randint(1, len(prompt) + max_tokens) if rng.random() < 0.06 else None,
            cancel_at=at_step + rng.randint(0, 25) if is_cancelled and not by_state else None,
            cancel_in=rng.choice((*CANCEL_STATES, *_RARE_STATES)) if is_cancelled and by_state else None,
        )

    def _prompt(self) -> tuple[int, ...]:
        rng, longest = self.rng, self.longest
        at_border = rng.randint(0, longest // self.block_size) * self.block_size + rng.choice((-1, 0, 0, 1))
        few = rng.randint(1, max(1, longest // 8))
        length = rng.choice((rng.randint(1, longest), few, few, max(1, longest // 3), at_border, longest))
        length = max(length, 1) if rng.random() < 0.95 else longest + rng.randint(1, 3)
        shared = rng.choice((0, length, length, length, rng.randint(0, length)))
        return (
            *rng.choice(self.texts)[:shared],
            *(rng.randrange(self.vocab_size) for _ in range(length - shared)),
        )

    def _grammar(self) -> StructuredOutput | None:
        rng = self.rng
        if not self.has_grammars or rng.random() < 0.5:
            return None
        return make_grammar(rng.choice((0, 1, 3, rng.randint(1, 12), SLOW_TURNS)), is_bad=rng.random() < 0.2)

    def _stop_strings(self) -> tuple[str, ...]:
        """Ids below 128 are characters: with few of them even strings of two come up."""
        if self.rng.random() < 0.75 or self.vocab_size > 128:
            return ()
        length = self.rng.randint(1, 3)
        return ("".join(chr(self.rng.randrange(self.vocab_size)) for _ in range(length)),)
