"""The ways to spread a checkpoint over the GPUs of a host: what of each card they take, found out without one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from cb_backend.cli.check_cards import Card
from cb_backend.cli.check_findings import Findings, examine
from cb_backend.cli.device_share import device_share, room_beside
from cb_backend.contracts.config import MAX_RANKS, EngineConfig
from cb_backend.contracts.errors import ConfigError
from cb_backend.kv_cache.storage import show_bytes
from cb_backend.study.gpu_plan import Room, Traffic, Way, plan_way, recommend
from cb_backend.study.machine import model_shape
from cb_backend.study.roofline import ModelShape

OWN = ("tensor_parallel_size", "data_parallel_size")  # arguments of the engine that are what is planned


@dataclass(frozen=True, slots=True)
class Planned:
    """Of one model, card and traffic."""

    found: Findings
    card: Card
    num_gpus: int
    traffic: Traffic
    shape: ModelShape
    ways: Sequence[Way]

    @property
    def best(self) -> Way | None:
        """The recommended one; None: the model fits nowhere."""
        return recommend(self.ways, self.traffic)

    @property
    def lack(self) -> str:
        """Why the model fits nowhere: of the most GPUs that can share it, which lack least."""
        way = max(self.ways, key=lambda way: (way.room.weight_bytes > 0, way.tensor_parallel_size))
        return way.room.fault or f"no room for {self.traffic.request_len:,} tokens"


def plan_ways(config: EngineConfig, card: Card, num_gpus: int, traffic: Traffic) -> Planned:
    """Every way over at most `num_gpus` of the card. `traffic`: requests of one length, which `max_model_len` must
    allow. Raises `ConfigError` where nothing can be planned of the model, or for requests that are too long."""
    found = examine(config)
    if found.spec is None or found.dtype is None:
        raise ConfigError(found.refusals[0])
    if found.max_model_len is not None and traffic.request_len > found.max_model_len:
        raise ConfigError(
            f"--input-len and --output-len are {traffic.request_len} tokens together, and max_model_len is"
            f" {found.max_model_len}; lower them"
        )
    dtype = str(found.dtype).removeprefix("torch.")
    shape = model_shape(found.spec, dtype, config.kv_cache_dtype, found.quantization)
    ways = []
    for num_ranks in range(1, min(num_gpus, MAX_RANKS) + 1):
        room = _room(found, config, num_ranks, card, traffic)
        ways += [
            plan_way(shape, card.rates, traffic, config.max_num_seqs, room, (num_ranks, num_engines))
            for num_engines in range(1, num_gpus // num_ranks + 1)
        ]
    return Planned(found, card, num_gpus, traffic, shape, ways)


def _room(found: Findings, config: EngineConfig, num_ranks: int, card: Card, traffic: Traffic) -> Room:
    try:
        config = replace(config, tensor_parallel_size=num_ranks)
        share = device_share(found, config)
    except ConfigError as error:
        return Room(0, 0, 0, str(error))
    room, faults = room_beside(share, found, config, card, traffic.request_len)
    fault = "; ".join(faults) or None
    if room is None:
        return Room(share.weight_bytes, 0, 0, fault)
    return Room(share.weight_bytes, room.num_tokens, room.longest_request, fault)


def table(planned: Planned) -> Iterator[str]:
    """Lines for a terminal: what was planned, and each way; the recommended one is marked."""
    found, traffic, best = planned.found, planned.traffic, planned.best
    yield (
        f"{found.model} on up to {planned.num_gpus} of {planned.card.name}: prompts of {traffic.input_len:,} tokens,"
        f" answers of {traffic.output_len:,}. Reckoned, not measured."
    )
    if found.refusals:
        yield f"As it is now, it would be refused: {found.refusals[0]} (`cb-backend check` says all)"
    yield ""
    yield "            a GPU             an engine                               all"
    yield "  tp  dp    weights      cache tokens  streams   alone     full    tokens/s"
    for way in planned.ways:
        start = f"{'*' if way is best else ' '} {way.tensor_parallel_size:2}  {way.data_parallel_size:2}"
        if not way.num_streams:
            if way.data_parallel_size == 1:  # of more engines the same is so
                yield f"{start}    {way.room.fault or f'no room for {traffic.request_len:,} tokens'}"
            continue
        yield (
            f"{start}  {show_bytes(way.room.weight_bytes):>10}  {way.room.cache_tokens:>15,}  {way.num_streams:>7}"
            f"  {1e3 * way.alone_itl:5.1f} ms {1e3 * way.itl:5.1f} ms  {way.tokens_per_second:>9,.0f}"
        )
