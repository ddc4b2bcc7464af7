"""Which entries of a model's dimensions each rank of a group has. Arithmetic alone: no tensors."""

from __future__ import annotations

from typing import NamedTuple

from cb_backend.contracts.config import MAX_RANKS
from cb_backend.contracts.errors import ConfigError


class Share(NamedTuple):
    """A rank's entries of a dimension: `size` of them from `start` on, and zeros behind them up to `room`.

    `room` is the same on all ranks, so that all compute the same shapes.
    """

    start: int
    size: int
    room: int

    def times(self, entries: int) -> Share:
        """Of a dimension in which so many entries stand for one of this."""
        return Share(self.start * entries, self.size * entries, self.room * entries)

    @property
    def stop(self) -> int:
        return self.start + self.size


def whole(size: int) -> Share:
    """All of it."""
    return Share(0, size, size)


def equal_share(size: int, rank: int, num_ranks: int, what: str) -> Share:
    """Raises `ConfigError` where the ranks do not divide the entries; `what`: they are of."""
    if size % num_ranks:
        raise ConfigError(
            f"{what}: {size} features cannot be shared out among {num_ranks} devices; use a number of devices that "
            "divides it"
        )
    a_rank = size // num_ranks
    return Share(rank * a_rank, a_rank, a_rank)


def padded_share(size: int, rank: int, num_ranks: int, granule: int) -> Share:
    """In whole granules but for the last entries; the last ranks have fewer, or none, where it does not come out."""
    if num_ranks == 1:
        return whole(size)
    room = -(-size // (num_ranks * granule)) * granule
    start = min(size, rank * room)
    return Share(start, min(size, start + room) - start, room)


def share_of_heads(num_heads: int, num_kv_heads: int, rank: int, num_ranks: int) -> tuple[Share, Share]:
    """(query heads, KV heads) of a rank: those that its query heads read; several ranks may have the same KV head.

    Raises `ConfigError` where the ranks do not come out with whole heads.
    """
    if not _fits(num_heads, num_kv_heads, num_ranks):
        fitting = [str(number) for number in range(1, MAX_RANKS + 1) if _fits(num_heads, num_kv_heads, number)]
        raise ConfigError(
            f"{num_heads} query heads and {num_kv_heads} KV heads cannot be shared out among {num_ranks} devices; "
            f"this model can be on {', '.join(fitting)}"
        )
    kv_heads = max(1, num_kv_heads // num_ranks)
    first = rank * num_kv_heads // num_ranks
    return equal_share(num_heads, rank, num_ranks, "query heads"), Share(first, kv_heads, kv_heads)


def share_of_experts(num_experts: int, rank: int, num_ranks: int) -> Share:
    """A rank's whole experts of a layer. Raises `ConfigError` where the ranks do not divide them."""
    if num_experts % num_ranks:
        fitting = [str(number) for number in range(1, MAX_RANKS + 1) if num_experts % number == 0]
        raise ConfigError(
            f"{num_experts} experts cannot be spread over {num_ranks} devices whole; with enable_expert_parallel this"
            f" model can be on {', '.join(fitting)}; without, each device has a part of every expert"
        )
    return equal_share(num_experts, rank, num_ranks, "experts")


def _fits(num_heads: int, num_kv_heads: int, num_ranks: int) -> bool:
    return num_heads % num_ranks == 0 and (num_kv_heads % num_ranks == 0 or num_ranks % num_kv_heads == 0)
