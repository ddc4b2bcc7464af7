"""Several ropes in one model, and layers that are not told positions."""

from __future__ import annotations

import torch

from cb_backend.kernels.qkv_post import qkv_post_torch
from cb_backend.layers.rope_config import RopeConfig
from cb_backend.layers.ropes import Ropes
from cb_backend.layers.rotary import RotaryTables

CPU = torch.device("cpu")
PLAIN = RopeConfig(rope_type="default", theta=100.0, max_position_embeddings=64)
LONG = RopeConfig(
    rope_type="longrope",
    theta=100.0,
    max_position_embeddings=64,
    factor=4.0,
    original_max_position_embeddings=16,
    short_factor=(1.0,) * 4,
    long_factor=(2.0,) * 4,
)
DYNAMIC = RopeConfig(rope_type="dynamic", theta=100.0, max_position_embeddings=16, factor=4.0)
POSITIONS = torch.tensor([0, 5, 40], dtype=torch.int32)
LENGTHS = torch.tensor([3, 9, 30], dtype=torch.int32)


def test_each_rope_has_its_own_table_and_rows() -> None:
    ropes = Ropes((PLAIN, LONG), 8, 64, CPU)
    found = ropes.rows(POSITIONS, LENGTHS)
    for (table, rows), config in zip(found, (PLAIN, LONG), strict=True):
        wanted, wanted_rows = RotaryTables(config, 8, 64, CPU).rows(POSITIONS, LENGTHS)
        assert torch.equal(table, wanted)
        assert torch.equal(rows, wanted_rows)
    assert not torch.equal(found[0][1], found[1][1])


def test_prompts_share_blocks_only_where_every_rope_agrees() -> None:
    keys = [Ropes(configs, 8, 64, CPU).cache_key for configs in ((PLAIN,), (LONG,), (PLAIN, LONG), (DYNAMIC, LONG))]
    assert [keys[0](length) for length in (4, 16, 17, 60)] == [b""] * 4
    assert [keys[1](length) for length in (4, 16, 17, 60)] == [b"", b"", b"rope:long", b"rope:long"]
    assert len({keys[2](length) for length in (4, 16, 17, 60)}) == 2
    assert len({keys[3](length) for length in (4, 16, 17, 60)}) == 3  # up to 16, 17, 60


def test_tables_are_static_only_if_all_are() -> None:
    assert Ropes((PLAIN, LONG), 8, 64, CPU, has_identity=True).is_static
    assert not Ropes((PLAIN, DYNAMIC), 8, 64, CPU).is_static


def test_the_identity_turns_nothing_and_takes_no_memory() -> None:
    torch.manual_seed(0)
    table, rows = Ropes((PLAIN,), 6, 1000, CPU, has_identity=True).rows(POSITIONS, LENGTHS)[-1]
    assert table.shape == (1000, 6)
    assert table.untyped_storage().nbytes() == 6 * 4
    qkv, cache = torch.randn(3, 4 * 8), torch.zeros(4, 2, 1, 4, 8)
    slots = torch.tensor([4, 5, 9], dtype=torch.int32)
    q = qkv_post_torch(qkv, table, rows, slots, cache, 2, 1, 8)
    assert torch.equal(q, qkv[:, :16].view(3, 2, 8))
    assert torch.equal(cache[1, 0, 0, 0], qkv[0, 16:24])


def test_queries_are_scaled_in_steps_of_the_original_length() -> None:
    rope = RopeConfig(
        rope_type="yarn",
        theta=100.0,
        max_position_embeddings=64,
        factor=4.0,
        original_max_position_embeddings=16,
        query_scale_beta=0.5,
    )
    table, rows = Ropes((rope,), 8, 64, CPU).rows(POSITIONS, LENGTHS)[0]
    assert table.shape == (64, 9)
    wanted = [1 + 0.5 * torch.tensor(float(1 + position // 16)).log() for position in (0, 5, 40)]
    torch.testing.assert_close(table[rows.long(), 8], torch.stack(wanted))
