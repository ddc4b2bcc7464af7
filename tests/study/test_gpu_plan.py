"""Ways to spread a model over GPUs: what is halved, what is paid for it, and which way is recommended."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cb_backend.study.gpu_plan import (
    SHARE_OF_LIMIT,
    Rates,
    Room,
    Traffic,
    Way,
    plan_way,
    rank_shape,
    recommend,
    token_seconds,
)
from cb_backend.study.roofline import CardLimits, ExpertShape, ModelShape, decode_seconds

SHAPE = ModelShape(
    num_layers=32, hidden_size=4096, num_heads=32, num_kv_heads=8, head_dim=128, intermediate_size=14336,
    vocab_size=128256,
)  # fmt: skip
RATES = Rates(CardLimits(4.3e12, 790e12), 360e9, 4e-6)
TRAFFIC = Traffic(input_len=1000, output_len=200)
ROOM = Room(16 << 30, 120_000, 120_000)


def test_ranks_share_everything_but_the_hidden_size() -> None:
    half = rank_shape(SHAPE, 2)
    assert half.bytes_per_step == SHAPE.bytes_per_step / 2
    assert half.kv_bytes_per_token == SHAPE.kv_bytes_per_token / 2
    assert half.hidden_size == SHAPE.hidden_size


def test_heads_of_keys_and_values_are_not_cut() -> None:
    assert rank_shape(replace(SHAPE, num_kv_heads=1), 4).num_kv_heads == 1


def test_experts_are_shared_feature_by_feature() -> None:
    experts = ExpertShape(num_layers=32, num_experts=8, top_k=2, intermediate_size=1024)
    own = rank_shape(replace(SHAPE, experts=experts), 2).experts
    assert own == replace(experts, intermediate_size=512)


def test_one_gpu_pays_for_no_sums() -> None:
    expected = decode_seconds(SHAPE, RATES.limits, 1, 1100) / SHARE_OF_LIMIT
    assert token_seconds(SHAPE, RATES, 1, 1, TRAFFIC) == pytest.approx(expected)


def test_two_sums_a_layer_come_on_top() -> None:
    half = decode_seconds(rank_shape(SHAPE, 2), RATES.limits, 1, 1100) / SHARE_OF_LIMIT
    sums = 64 * (4e-6 + 8192 / 360e9)
    assert token_seconds(SHAPE, RATES, 2, 1, TRAFFIC) == pytest.approx(half + sums)


def test_a_slow_link_makes_more_gpus_slower() -> None:
    slow = replace(RATES, link=1e9)
    alone, together = (token_seconds(SHAPE, slow, number, 64, TRAFFIC) for number in (1, 8))
    assert together > alone


def test_as_many_streams_run_as_there_is_cache_or_slots_for() -> None:
    assert plan_way(SHAPE, RATES, TRAFFIC, 256, ROOM, (1, 1)).num_streams == 100
    assert plan_way(SHAPE, RATES, TRAFFIC, 64, ROOM, (1, 1)).num_streams == 64
    assert plan_way(SHAPE, RATES, TRAFFIC, 64, Room(0, 1199, 1199), (1, 1)).num_streams == 0
    assert plan_way(SHAPE, RATES, TRAFFIC, 64, Room(0, 9999, 1199), (1, 1)).num_streams == 0, "none is taken"
    assert plan_way(SHAPE, RATES, TRAFFIC, 64, Room(0, 9999, 9999, "it has other kernels"), (1, 1)).num_streams == 0


def test_a_target_bounds_the_streams() -> None:
    """One more would be too slow."""
    target = replace(TRAFFIC, target_itl=0.008)
    way = plan_way(SHAPE, RATES, target, 256, ROOM, (1, 1))
    assert 1 < way.num_streams < 100
    assert way.itl <= 0.008 < token_seconds(SHAPE, RATES, 1, way.num_streams + 1, target)


def test_engines_beside_one_another_add_up() -> None:
    one, two = (plan_way(SHAPE, RATES, TRAFFIC, 256, ROOM, (1, number)) for number in (1, 2))
    assert two.tokens_per_second == 2 * one.tokens_per_second
    assert (two.itl, two.num_gpus) == (one.itl, 2)


def way(num_ranks: int, num_engines: int, tokens_per_second: float, itl: float = 0.01, num_streams: int = 9) -> Way:
    return Way(
        tensor_parallel_size=num_ranks, data_parallel_size=num_engines, room=ROOM, num_streams=num_streams, itl=itl,
        tokens_per_second=tokens_per_second,
    )  # fmt: skip


def test_most_tokens_a_second_are_recommended() -> None:
    ways = [way(1, 1, 1000), way(1, 2, 2000), way(2, 1, 1500)]
    assert recommend(ways, TRAFFIC) is ways[1]


def test_of_nearly_equal_ones_the_fewest_gpus_that_hold_a_model_together() -> None:
    ways = [way(2, 1, 1010), way(1, 2, 1000), way(4, 1, 1020)]
    assert recommend(ways, TRAFFIC) is ways[1]


def test_what_has_no_room_is_not_recommended() -> None:
    none, two = way(1, 2, 0, num_streams=0), way(2, 1, 1500)
    assert recommend([none, two], TRAFFIC) is two
    assert recommend([none], TRAFFIC) is None


def test_a_target_comes_before_tokens_a_second() -> None:
    ways, target = [way(1, 2, 2000, itl=0.02), way(2, 1, 1500, itl=0.01)], replace(TRAFFIC, target_itl=0.012)
    assert recommend(ways, target) is ways[1]
    assert recommend(ways, replace(TRAFFIC, target_itl=0.005)) is ways[1]  # none keeps it: the nearest
    ways += [way(2, 2, 3000, itl=0.01)]
    assert recommend(ways, replace(TRAFFIC, target_itl=0.005)) is ways[2]  # as near, and more tokens
