"""The bytes of a token and of a block, against figures counted by hand and models' published ones."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from types import SimpleNamespace

import pytest

from cb_backend.kv_cache.layout import (
    ALL_TOKENS,
    MOST_GROUPS,
    KVGroup,
    KVLayout,
    bytes_per_token,
    kept_windows,
    kv_groups,
    layout_of,
    one_group,
)

MODEL = SimpleNamespace(num_layers=3, num_kv_heads=2, head_dim=24)


def test_a_model_without_windows_is_one_group() -> None:
    layout = layout_of(MODEL, 16, 4)
    assert layout.groups == (KVGroup(window=0, layers=(0, 1, 2), kind="keys and values"),)
    assert (layout.num_layers, layout.layers_per_block, layout.block_size) == (3, 3, 16)
    assert (layout.num_kv_heads, layout.head_dim, layout.element_bytes) == (2, 24, 4)


def test_bytes_are_those_of_every_key_and_value() -> None:
    layout = layout_of(MODEL, 16, 4)
    assert layout.layer_shape == (2, 2, 16, 24)
    assert layout.shape(7) == (3, 7, 2, 2, 16, 24)
    assert layout.bytes_per_token == 3 * 2 * 2 * 24 * 4
    assert layout.bytes_per_block == 16 * layout.bytes_per_token


@pytest.mark.parametrize(
    ("sizes", "element_bytes", "expected"),
    [
        ((28, 8, 128), 2, 114_688),  # Qwen3-0.6B
        ((16, 8, 64), 2, 32_768),  # Llama-3.2-1B
        ((32, 8, 128), 1, 65_536),  # Llama-3.1-8B, fp8
        ((1, 8, 128), 0.5, 1024),  # one layer, four bits an element
    ],
)
def test_bytes_per_token_of_models(sizes: tuple[int, int, int], element_bytes: float, expected: int) -> None:
    assert bytes_per_token(*sizes, element_bytes) == expected


def test_several_groups_share_blocks_of_one_groups_layers() -> None:
    groups = (KVGroup(ALL_TOKENS, (1, 3)), KVGroup(8, (0, 2)), KVGroup(8, (4, 5)))
    layout = dataclasses.replace(layout_of(MODEL, 4, 2), groups=groups)
    assert (layout.num_layers, layout.layers_per_block) == (6, 2)
    assert layout.shape(9) == (2, 9, 2, 2, 4, 24)
    assert layout.bytes_per_token == 6 * 2 * 2 * 24 * 2
    assert layout.bytes_per_block == 4 * 2 * (2 * 2 * 24 * 2)


def test_blocks_of_a_small_group_are_as_large_as_the_others() -> None:
    groups = (KVGroup(ALL_TOKENS, (1,)), KVGroup(8, (0, 2)))
    layout = dataclasses.replace(layout_of(MODEL, 4, 2), groups=groups)
    assert (layout.num_layers, layout.layers_per_block, layout.windows) == (3, 2, (0, 8))
    assert layout.bytes_per_block == 4 * 2 * (2 * 2 * 24 * 2)


PUBLISHED = {  # windows of the layers, and how many groups of how many layers they make
    "gpt-oss-20b": ((128, 0) * 12, [(0, 12), (128, 12)]),
    "gemma2-9b": ((4096, 0) * 21, [(0, 21), (4096, 21)]),
    "gemma3-1b": (((512,) * 5 + (0,)) * 4 + (512,) * 2, [(0, 4), *[(512, 4)] * 5, (512, 2)]),
    "gemma3-4b": (((1024,) * 5 + (0,)) * 5 + (1024,) * 4, [(0, 5), *[(1024, 5)] * 5, (1024, 4)]),
    "gemma3-27b": (((1024,) * 5 + (0,)) * 10 + (1024,) * 2, [(0, 10), *[(1024, 10)] * 5, (1024, 2)]),
    "olmo3-7b": ((4096, 4096, 4096, 0) * 8, [(0, 8), *[(4096, 8)] * 3]),
    "no window": ((0,) * 28, [(0, 28)]),
    "one window": ((4096,) * 32, [(4096, 32)]),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_groups_of_published_models(name: str) -> None:
    windows, expected = PUBLISHED[name]
    groups = kv_groups(windows)
    assert [(group.window, len(group.layers)) for group in groups] == expected
    assert sorted(layer for group in groups for layer in group.layers) == list(range(len(windows)))
    assert all(windows[layer] == group.window for group in groups for layer in group.layers)


def test_no_model_has_more_groups_than_the_host_can_bear() -> None:
    for num_whole in range(1, 40):
        windows = (ALL_TOKENS,) * num_whole + (64,) * (40 - num_whole) + (32,) * 7
        assert 3 <= len(kv_groups(windows)) <= MOST_GROUPS or num_whole == 40


def test_windows_that_no_request_outgrows_are_none() -> None:
    assert kept_windows((0, 127, 128, 129), 128) == (0, 127, ALL_TOKENS, ALL_TOKENS)


def test_whole_blocks_only() -> None:
    layout = layout_of(SimpleNamespace(num_layers=1, num_kv_heads=1, head_dim=5), 10, 1)
    assert layout.bytes_per_block == 100
    assert [layout.num_blocks_in(num_bytes) for num_bytes in (-101, -1, 99, 100, 350)] == [0, 0, 0, 1, 3]


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ((), "a layout needs a group of layers at least"),
        ((KVGroup(0, (0,), "states"),), r"layers \(0,\) keep 'states'; keys and values can be kept"),
    ],
)
def test_groups_that_cannot_share_blocks_are_refused(groups: tuple[KVGroup, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KVLayout(groups=groups, num_kv_heads=1, head_dim=8, block_size=4, element_bytes=2)


@pytest.mark.parametrize(
    ("windows", "expected"),
    [
        ((0, 0, 4), [(0, 1), (0, 1), (4, 1)]),  # groups of one layer leave nothing empty
        ((0,) * (MOST_GROUPS - 1) + (4,), [*[(0, 1)] * (MOST_GROUPS - 1), (4, 1)]),  # just so many
        ((0,) * MOST_GROUPS + (4,), [*[(0, 2)] * (MOST_GROUPS // 2), (4, 1)]),  # one more would be too many
    ],
)
def test_small_groups_as_long_as_they_are_few(windows: tuple[int, ...], expected: list[tuple[int, int]]) -> None:
    assert MOST_GROUPS == 8
    assert [(group.window, len(group.layers)) for group in kv_groups(windows)] == expected


def test_layers_in_order() -> None:
    assert one_group(4) == (KVGroup(ALL_TOKENS, (0, 1, 2, 3)),)


def test_a_layout_is_made_by_names_and_stays_as_it_is() -> None:
    layout = layout_of(MODEL, 16, 4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        layout.block_size = 32  # type: ignore[misc]
    with pytest.raises(TypeError):
        KVLayout(one_group(3), 2, 24, 16, 4)  # type: ignore[misc]
    assert not hasattr(layout, "__dict__")
    assert len({layout, layout_of(MODEL, 16, 4), layout_of(MODEL, 16, 2)}) == 2


def test_arithmetic_needs_no_torch() -> None:
    code = "import sys, cb_backend.kv_cache.layout; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
