"""How a model can be spread over the GPUs of one host: what each way holds, how fast it is, and which one to take.

`tensor_parallel_size` GPUs hold the model together and share the work of each step, `data_parallel_size` engines share
the requests. The first makes steps shorter and room for larger models, the second gains more tokens a second from the
same GPUs. Pure arithmetic from sizes and data sheets: knows no device and no engine.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cb_backend.study.roofline import CardLimits, ModelShape, decode_seconds, prefill_seconds

SHARE_OF_LIMIT = 0.85  # of what memory and arithmetic allow, that steps reach (docs/measured.md)
NEARLY = 0.03  # a difference that says nothing at this accuracy


@dataclass(frozen=True, slots=True)
class Rates:
    """What a GPU does a second."""

    limits: CardLimits
    link: float  # bytes/s that it reads of another GPU's memory, or gets by way of the host
    sum_seconds: float  # of a sum of little: the way there and back


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests that are all alike; as many of them as there is room for."""

    input_len: int
    output_len: int
    target_itl: float | None = None  # seconds from token to token, at most; None: as it comes

    @property
    def request_len(self) -> int:
        return self.input_len + self.output_len


@dataclass(frozen=True, slots=True)
class Room:
    """What is left for the cache of each of an engine's GPUs, or why the model is not on so many."""

    weight_bytes: int  # a GPU
    cache_tokens: int  # of an engine
    longest_request: int  # tokens of prompt and answer that an engine takes
    fault: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to spread the model; times in seconds."""

    tensor_parallel_size: int
    data_parallel_size: int
    room: Room
    num_streams: int = 0  # of an engine, at once; 0: it does not do
    alone_itl: float = 0.0  # from token to token, of one stream alone
    itl: float = 0.0  # the same of `num_streams`, their prompts beside them
    tokens_per_second: float = 0.0  # output tokens, of all engines

    @property
    def num_gpus(self) -> int:
        return self.tensor_parallel_size * self.data_parallel_size


def rank_shape(shape: ModelShape, num_ranks: int) -> ModelShape:
    """What one of so many GPUs has of the model."""

    def part(size: int) -> int:
        return -(-size // num_ranks)

    experts = shape.experts
    return replace(
        shape,
        num_heads=part(shape.num_heads),
        num_kv_heads=max(1, shape.num_kv_heads // num_ranks),
        intermediate_size=part(shape.intermediate_size),
        vocab_size=part(shape.vocab_size),
        experts=experts
        and replace(experts, intermediate_size=part(experts.intermediate_size), shared_size=part(experts.shared_size)),
    )


def decode_step_seconds(shape: ModelShape, rates: Rates, num_ranks: int, num_streams: int, num_context: int) -> float:
    """Of a step in which so many streams decode, with so many tokens of context in all."""
    step = decode_seconds(rank_shape(shape, num_ranks), rates.limits, num_streams, num_context)
    return step / SHARE_OF_LIMIT + _sums_seconds(shape, rates, num_ranks, num_streams)


def prompt_seconds(shape: ModelShape, rates: Rates, num_ranks: int, num_tokens: int) -> float:
    """Of a prompt that is computed by itself."""
    prompt = prefill_seconds(rank_shape(shape, num_ranks), rates.limits, [num_tokens])
    return prompt / SHARE_OF_LIMIT + _sums_seconds(shape, rates, num_ranks, num_tokens)


def token_seconds(shape: ModelShape, rates: Rates, num_ranks: int, num_streams: int, traffic: Traffic) -> float:
    """From token to token where so many streams decode and each that ends is followed by another, whose prompt is
    computed beside them."""
    context = num_streams * (traffic.input_len + traffic.output_len // 2)
    seconds = decode_step_seconds(shape, rates, num_ranks, num_streams, context)
    if num_streams > 1:
        prompts_a_step = num_streams / traffic.output_len
        seconds += prompts_a_step * prompt_seconds(shape, rates, num_ranks, traffic.input_len)
    return seconds


def _sums_seconds(shape: ModelShape, rates: Rates, num_ranks: int, num_tokens: int) -> float:
    """Two sums a layer, in which each GPU reads what every other one has."""
    if num_ranks == 1:
        return 0.0
    num_bytes = 2 * num_tokens * shape.hidden_size
    return 2 * shape.num_layers * (rates.sum_seconds + (num_ranks - 1) * num_bytes / rates.link)


def plan_way(
    shape: ModelShape, rates: Rates, traffic: Traffic, max_num_seqs: int, room: Room, sizes: tuple[int, int]
) -> Way:
    """sizes: (tensor_parallel_size, data_parallel_size)."""
    num_ranks, num_engines = sizes
    way = Way(tensor_parallel_size=num_ranks, data_parallel_size=num_engines, room=room)
    fits = room.fault is None and traffic.request_len <= room.longest_request
    most = min(max_num_seqs, room.cache_tokens // traffic.request_len) if fits else 0
    if not most:
        return way

    def seconds(num_streams: int) -> float:
        return token_seconds(shape, rates, num_ranks, num_streams, traffic)

    num_streams = most
    if traffic.target_itl is not None:
        num_streams = max(1, bisect_right(range(1, most + 1), traffic.target_itl, key=seconds))
    itl = seconds(num_streams)
    return replace(
        way,
        num_streams=num_streams,
        alone_itl=seconds(1),
        itl=itl,
        tokens_per_second=num_engines * num_streams / itl,
    )


def recommend(ways: Sequence[Way], traffic: Traffic) -> Way | None:
    """Of those that keep the target, or else of all that have room: the one with the most tokens a second, and of
    those that are nearly equal the one of the fewest GPUs that hold a model together. None: the model fits nowhere.
    """
    fitting = [way for way in ways if way.num_streams]
    if not fitting:
        return None
    if traffic.target_itl is not None:
        kept = [way for way in fitting if way.itl <= traffic.target_itl]
        if not kept:
            return min(fitting, key=lambda way: (way.itl, way.tensor_parallel_size, -way.tokens_per_second))
        fitting = kept
    most = max(way.tokens_per_second for way in fitting)
    good = [way for way in fitting if way.tokens_per_second >= (1 - NEARLY) * most]
    return min(good, key=lambda way: (way.tensor_parallel_size, way.num_gpus))
