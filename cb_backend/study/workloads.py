"""The benchmark workloads: token-id prompts, output lengths and arrival times, the same on every machine.

W1, b and c draw exactly what the peer engines' scripts draw, so that both sides compute the same lengths. A further
repetition keeps the lengths and draws other ids, so that no prefix cache helps. Knows no engine and no clock.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cb_backend.contracts.errors import ConfigError
from cb_backend.traffic.traces import read_trace
from cb_backend.traffic.workload import scaled_trace_times

HIGHEST_DRAWN_ID = 10_000  # as nano-vllm draws; every vocabulary of interest is larger


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in the order of their arrival; end-of-sequence is ignored, so the lengths are exact."""

    name: str
    prompts: list[NDArray[np.int32]]  # each [num_prompt_tokens]
    output_lens: list[int]
    arrivals: list[float]  # seconds after the start; 0 for an offline workload
    num_shared_tokens: list[int] | None = None  # leading prompt tokens that an earlier request has too (W5)

    @property
    def prompt_lens(self) -> list[int]:
        return [len(prompt) for prompt in self.prompts]

    @property
    def is_offline(self) -> bool:
        return not any(self.arrivals)

    @property
    def max_total_tokens(self) -> int:
        """The longest request, prompt and output: what max_model_len must reach."""
        return max(len(prompt) + output for prompt, output in zip(self.prompts, self.output_lens, strict=True))

    @property
    def lengths_digest(self) -> str:
        return lengths_digest(self.prompt_lens, self.output_lens)

    def first(self, count: int) -> Workload:
        """The first `count` requests (smoke tests)."""
        shared = None if self.num_shared_tokens is None else self.num_shared_tokens[:count]
        return replace(
            self,
            prompts=self.prompts[:count],
            output_lens=self.output_lens[:count],
            arrivals=self.arrivals[:count],
            num_shared_tokens=shared,
        )


def lengths_digest(prompt_lens: Sequence[int], output_lens: Sequence[int]) -> str:
    """Names a list of lengths, so that two engines' runs can be told to be of the same work."""
    text = ",".join(f"{prompt}/{output}" for prompt, output in zip(prompt_lens, output_lens, strict=True))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Draw:
    """What a workload may depend on."""

    vocab_size: int
    repetition: int = 0
    rate: float = math.inf  # requests/s of W3 and W4; inf: all at once (W3), the trace's own times (W4)
    trace: Path | None = None  # of W4


def offline(name: str, prompts: Sequence[Sequence[int]], output_lens: Sequence[int]) -> Workload:
    return Workload(
        name, [np.asarray(prompt, np.int32) for prompt in prompts], list(output_lens), [0.0] * len(output_lens)
    )


def draw_ids(source: random.Random, count: int, vocab_size: int) -> list[int]:
    """Ids as the peer's script draws them."""
    limit = min(vocab_size, HIGHEST_DRAWN_ID + 1)
    return [source.randrange(0, limit) for _ in range(count)]


def nano_256(draw: Draw) -> Workload:
    """W1 (the peer script's `a`): nano-vllm's own draw, 256 sequences, 100 to 1024 in and out."""
    source = random.Random(0)
    prompts = [[source.randint(0, HIGHEST_DRAWN_ID) for _ in range(source.randint(100, 1024))] for _ in range(256)]
    output_lens = [source.randint(100, 1024) for _ in range(256)]
    if draw.repetition:
        other = random.Random(1000 + draw.repetition)
        prompts = [draw_ids(other, len(prompt), draw.vocab_size) for prompt in prompts]
    elif draw.vocab_size <= HIGHEST_DRAWN_ID:
        prompts = [[token_id % draw.vocab_size for token_id in prompt] for prompt in prompts]
    return offline("W1", prompts, output_lens)


def latency_pairs(draw: Draw, num_pairs: int, name: str = "b") -> list[tuple[Workload, Workload]]:
    """Rows of 128 in, once with 1 and once with more out; the pair gives TTFT and TPOT. The first pair warms up.

    b is a row alone, d8 eight at once, and so on.
    """
    source, (num_rows, longest) = random.Random(7), LATENCY_PAIRS[name]

    def one(output_len: int) -> Workload:
        prompts = [draw_ids(source, 128, draw.vocab_size) for _ in range(num_rows)]
        return offline(name, prompts, [output_len] * num_rows)

    warm_up = one(longest)
    return [(warm_up, warm_up)] + [(one(1), one(longest)) for _ in range(num_pairs)]


def lognormal_len(source: random.Random, mean: float, sigma: float, low: int, high: int) -> int:
    """A length whose mean before clipping to [low, high] is `mean`."""
    return min(high, max(low, round(source.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma))))


def lognormal_1000(draw: Draw) -> Workload:
    """c: 1,000 requests at once, lognormal lengths of mean 512 in and 256 out."""
    source = random.Random(0)
    prompt_lens = [lognormal_len(source, 512, 0.6, 16, 2048) for _ in range(1000)]
    output_lens = [lognormal_len(source, 256, 0.6, 16, 1024) for _ in range(1000)]
    ids = random.Random(2000 + draw.repetition)
    return offline("c", [draw_ids(ids, length, draw.vocab_size) for length in prompt_lens], output_lens)


def fixed(name: str, num_requests: int, prompt_len: int, output_len: int, draw: Draw) -> Workload:
    """Equal lengths, all at once."""
    ids = random.Random(f"{name}-{draw.repetition}")
    prompts = [draw_ids(ids, prompt_len, draw.vocab_size) for _ in range(num_requests)]
    return offline(name, prompts, [output_len] * num_requests)


def poisson_arrivals(source: random.Random, count: int, rate: float) -> list[float]:
    """`count` arrival times in seconds at `rate` requests/s; all 0 for an infinite rate."""
    if math.isinf(rate):
        return [0.0] * count
    now, times = 0.0, []
    for _ in range(count):
        now += source.expovariate(rate)
        times.append(now)
    return times


def chat_like(draw: Draw) -> Workload:
    """W3: lengths as of chat logs (lognormal, capped at 1,024: mean about 220 in, 200 out), Poisson arrivals.

    The two means are those published for chat data sets; no data set is read.
    """
    source = random.Random(3)
    prompt_lens = [lognormal_len(source, 245, 1.0, 4, 1024) for _ in range(1000)]
    output_lens = [lognormal_len(source, 208, 0.8, 4, 1024) for _ in range(1000)]
    ids = random.Random(3000 + draw.repetition)
    workload = offline("W3", [draw_ids(ids, length, draw.vocab_size) for length in prompt_lens], output_lens)
    return replace(workload, arrivals=poisson_arrivals(source, 1000, draw.rate))


def trace_replay(draw: Draw, max_requests: int = 1000) -> Workload:
    """W4: lengths and gaps of the first requests of a trace; a finite rate scales the gaps to that mean rate.

    Raises `ConfigError` when there is no trace, `TraceError` when it cannot be read.
    """
    if draw.trace is None:
        raise ConfigError("workload W4 replays a trace; name one with --trace FILE")
    rows = read_trace(draw.trace, limit=max_requests)
    times = scaled_trace_times(rows, time_scale=1.0, rate=None if math.isinf(draw.rate) else draw.rate)
    ids = random.Random(4000 + draw.repetition)
    prompts = [draw_ids(ids, row.num_prompt_tokens, draw.vocab_size) for row in rows]
    return replace(offline("W4", prompts, [row.num_output_tokens for row in rows]), arrivals=times.tolist())


def shared_prefix(name: str, num_prefixes: int, num_users: int, draw: Draw) -> Workload:
    """W5: users share a 2,048-token prefix and add 64 tokens of their own; 128 out. Users of the prefixes alternate."""
    ids = random.Random(f"{name}-{draw.repetition}")
    prefixes = [draw_ids(ids, 2048, draw.vocab_size) for _ in range(num_prefixes)]
    prompts = [prefix + draw_ids(ids, 64, draw.vocab_size) for _ in range(num_users) for prefix in prefixes]
    workload = offline(name, prompts, [128] * len(prompts))
    shared = [0 if index < num_prefixes else 2048 for index in range(len(prompts))]
    return replace(workload, num_shared_tokens=shared)


def interference(draw: Draw, num_long: int = 8) -> Workload:
    """W8: 32 steady decodes (128 in, 4,096 out) and an 8,192-token prompt a second; the figure is the ITL's tail."""
    ids = random.Random(8000 + draw.repetition)
    prompts = [draw_ids(ids, 128, draw.vocab_size) for _ in range(32)]
    prompts += [draw_ids(ids, 8192, draw.vocab_size) for _ in range(num_long)]
    workload = offline("W8", prompts, [4096] * 32 + [1] * num_long)
    return replace(workload, arrivals=[0.0] * 32 + [1.0 + second for second in range(num_long)])


WORKLOADS: dict[str, Callable[[Draw], Workload]] = {
    "W1": nano_256,
    "W2-128-128": lambda draw: fixed("W2-128-128", 1024, 128, 128, draw),
    "W2-1000-1000": lambda draw: fixed("W2-1000-1000", 256, 1000, 1000, draw),
    "W2-2048-128": lambda draw: fixed("W2-2048-128", 256, 2048, 128, draw),
    "W2-128-2048": lambda draw: fixed("W2-128-2048", 256, 128, 2048, draw),
    "W3": chat_like,
    "W4": trace_replay,
    "W5-1x64": lambda draw: shared_prefix("W5-1x64", 1, 64, draw),
    "W5-8x32": lambda draw: shared_prefix("W5-8x32", 8, 32, draw),
    "W6-8": lambda draw: fixed("W6-8", 8, 8192, 32, draw),
    "W6-32": lambda draw: fixed("W6-32", 32, 8192, 32, draw),
    "W7-1": lambda draw: fixed("W7-1", 1, 512, 256, draw),
    "W7-8": lambda draw: fixed("W7-8", 8, 512, 256, draw),
    "W8": interference,
    "long-1x32k": lambda draw: fixed("long-1x32k", 1, 32768, 64, draw),
    "long-64x8k": lambda draw: fixed("long-64x8k", 64, 8192, 64, draw),
    "c": lognormal_1000,
}
# Not one workload but a series of pairs: rows at once, tokens out of the long one of a pair. See `latency_pairs`.
LATENCY_PAIRS = {"b": (1, 256), "d8": (8, 257), "d32": (32, 257), "d64": (64, 257), "d256": (256, 257)}


def expand_names(names: str) -> list[str]:
    """`W1,W2` and the peer scripts' `a,b,c` to keys of `WORKLOADS` and `LATENCY_PAIRS`.

    Raises `ConfigError` for an unknown one.
    """
    found: list[str] = []
    for name in filter(None, names.split(",")):
        if name == "a" or name in LATENCY_PAIRS or name in WORKLOADS:
            found.append("W1" if name == "a" else name)
            continue
        group = [key for key in WORKLOADS if key.startswith(f"{name}-")]
        if not group:
            known = ", ".join(("a", *LATENCY_PAIRS, *WORKLOADS))
            raise ConfigError(f"workload {name!r} is not known; use a group (W2) or one of {known}")
        found += group
    return list(dict.fromkeys(found))
