"""How much KV cache fits, and what is said when it does not."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from cb_backend.contracts.config import EngineConfig
from cb_backend.contracts.errors import ConfigError
from cb_backend.kv_cache import storage
from cb_backend.kv_cache.layout import KVGroup, layout_of
from cb_backend.kv_cache.storage import KVCacheStorage, size_kv_cache

CPU = torch.device("cpu")
SHAPE = SimpleNamespace(num_layers=3, num_kv_heads=2, head_dim=24)
LAYOUT = layout_of(SHAPE, 16, 4)
BLOCK_BYTES = 3 * 2 * 2 * 16 * 24 * 4  # float32, 16 tokens


def size(**settings: object) -> int:
    config = EngineConfig(model="m", **settings)
    return size_kv_cache(config, layout_of(SHAPE, config.block_size, 4), CPU)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device with 4 GiB free of 8."""
    monkeypatch.setattr(storage, "free_memory", lambda device: (4 << 30, 8 << 30))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_tensor_has_the_bytes_that_were_counted(dtype: torch.dtype) -> None:
    layout = layout_of(SHAPE, 16, dtype.itemsize)
    cache = KVCacheStorage(layout, 5, dtype, CPU)
    assert cache.data.shape == (3, 5, 2, 2, 16, 24)
    assert cache.data.dtype == dtype
    assert cache.data.untyped_storage().nbytes() == 5 * layout.bytes_per_block
    assert not cache.data.any()


def test_layers_are_views() -> None:
    cache = KVCacheStorage(LAYOUT, 5, torch.float32, CPU)
    cache.layers[2].cells[4, 1, 0, 15, 23] = 7.0
    assert cache.data[2, 4, 1, 0, 15, 23] == 7.0
    assert cache.data.sum() == 7.0
    assert len(cache.layers) == 3


def test_a_layer_finds_its_row_whatever_group_it_is_in() -> None:
    groups = (KVGroup(0, (1, 3)), KVGroup(4, (0, 2)))
    layout = dataclasses.replace(LAYOUT, groups=groups)
    cache = KVCacheStorage(layout, 5, torch.float32, CPU)
    assert cache.data.shape[:2] == (2, 5)
    assert [layer.cells.data_ptr() for layer in cache.layers] == [cache.data[row].data_ptr() for row in (0, 0, 1, 1)]
    assert [layer.group for layer in cache.layers] == [1, 0, 1, 0]


def test_a_layout_of_another_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a layout of 4 bytes an element cannot hold torch\.bfloat16"):
        KVCacheStorage(LAYOUT, 5, torch.bfloat16, CPU)


@pytest.mark.usefixtures("memory")
def test_settings_decide_the_number_of_blocks() -> None:
    assert size(num_gpu_blocks_override=12) == 13  # and the null block
    assert size(kv_cache_memory_bytes=10 * BLOCK_BYTES + 1) == 10
    assert size() == (1 << 30) // BLOCK_BYTES
    assert size(kv_cache_memory_bytes=10 * BLOCK_BYTES, block_size=32) == 5


@pytest.mark.usefixtures("memory")
def test_gpu_takes_its_share_of_what_is_free() -> None:
    config = EngineConfig(model="m", gpu_memory_utilization=0.75)
    blocks = size_kv_cache(config, LAYOUT, torch.device("cuda"))
    assert blocks == (2 << 30) // BLOCK_BYTES  # 4 GiB are in use, 6 may be


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"kv_cache_memory_bytes": 5 << 30},
            r"kv_cache_memory_bytes asks for .* = 5\.00 GiB, 4\.00 GiB of 8\.00 GiB are free on the cpu .*"
            r"Lower kv_cache_memory_bytes",
        ),
        ({"num_gpu_blocks_override": 1_000_000}, r"num_gpu_blocks_override asks for 1000001 blocks of 18\.0 KiB"),
        ({"kv_cache_memory_bytes": 1000}, r"a block of 16 tokens takes 18\.0 KiB and kv_cache_memory_bytes leaves 0"),
    ],
)
def test_what_does_not_fit_is_told_in_figures(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        size(**settings)


@pytest.mark.usefixtures("memory")
def test_gpu_that_is_full_already() -> None:
    config = EngineConfig(model="m", gpu_memory_utilization=0.5)
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization leaves 0 blocks.*Raise gpu_memory_utilization"):
        size_kv_cache(config, LAYOUT, torch.device("cuda"))


@pytest.mark.usefixtures("memory")
def test_what_steps_need_is_left_free() -> None:
    config = EngineConfig(model="m", gpu_memory_utilization=0.75)
    cuda = torch.device("cuda")
    assert size_kv_cache(config, LAYOUT, cuda, 1 << 30) == (1 << 30) // BLOCK_BYTES
    remedy = r"steps need 3\.00 GiB of them.*lower max_num_batched_tokens or max_num_seqs"
    with pytest.raises(ConfigError, match=remedy):
        size_kv_cache(config, LAYOUT, cuda, 3 << 30)
    config = EngineConfig(model="m", kv_cache_memory_bytes=2 << 30)  # explicit, and free, but not beside the steps
    remedy = rf"steps need 3\.00 GiB.*Lower kv_cache_memory_bytes \(at most {1 << 30} would fit\) or max_num_batched"
    with pytest.raises(ConfigError, match=remedy):
        size_kv_cache(config, LAYOUT, cuda, 3 << 30)


def test_the_system_says_what_is_free() -> None:
    free, total = storage.free_memory(CPU)
    assert 0 < free <= total
