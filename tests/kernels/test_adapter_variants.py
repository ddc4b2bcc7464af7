"""What a layer with adapters launches, for every number of tokens of a step: the start has rehearsed it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from cb_backend.engine.runner.cuda_warm_up import rehearsed_shapes
from cb_backend.kernels import launch, linear, linear_one_row, lora_expand, lora_gated, lora_shrink
from cb_backend.kernels.launch import launch_parameters, next_power_of_2
from cb_backend.kernels.linear_shrink import linear_shrink
from cb_backend.kernels.lora_plan import new_plan

META = torch.device("meta")  # sizes of an 8B's, without their memory
MAX_ADAPTERS, RANK, HIDDEN, INTERMEDIATE = 8, 16, 4096, 14336
SLICES = ((4096, 1024, 1024), (HIDDEN,), (INTERMEDIATE, INTERMEDIATE), (HIDDEN,))
KERNELS = (
    (linear, "_linear_kernel"),
    (linear_one_row, "_one_row_kernel"),
    (lora_shrink, "_lora_shrink_kernel"),
    (lora_expand, "_lora_expand_kernel"),
    (lora_gated, "_lora_expand_gated_kernel"),
)


class Recorder:
    """In place of a kernel: what is compiled for its launches."""

    def __init__(self, name: str, variants: set[tuple[str, tuple[tuple[str, int], ...]]]) -> None:
        self.name, self.variants = name, variants

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *_, **constants: self.variants.add((self.name, tuple(sorted(constants.items()))))


@pytest.fixture
def variants(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[tuple[str, tuple[tuple[str, int], ...]]]]:
    """Of what is launched with an H200's table."""
    found: set[tuple[str, tuple[tuple[str, int], ...]]] = set()
    for module, name in KERNELS:
        monkeypatch.setattr(module, name, Recorder(name, found))
        monkeypatch.setattr(module, "can_overlap", lambda device: True)
    monkeypatch.setattr(launch, "can_overlap", lambda device: True)
    launch.dependent_options.cache_clear()
    monkeypatch.setattr(linear, "_library_product", lambda x, weight, *_: x.new_empty(x.shape[0], weight.shape[0]))
    monkeypatch.setattr(launch, "tuned_files", lambda device: ("nvidia-h200.json", "default.json"))
    launch._tuned_parameters.cache_clear()
    yield found
    launch._tuned_parameters.cache_clear()
    launch.dependent_options.cache_clear()


def run_layer(num_tokens: int) -> None:
    def empty(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=META)

    tile_rows = launch_parameters("lora_plan", META, m=min(next_power_of_2(num_tokens), 8192))["tile_rows"]
    plan = new_plan(num_tokens, MAX_ADAPTERS, tile_rows, META)
    for slices, in_size in zip(SLICES, (HIDDEN, HIDDEN, HIDDEN, INTERMEDIATE), strict=True):
        out_size, columns = sum(slices), len(slices) * RANK
        x, weight, a = empty(num_tokens, in_size), empty(out_size, in_size), empty(MAX_ADAPTERS, columns, in_size)
        product, shrunk = linear_shrink(x, weight, None, None, a, plan)
        b, scales = empty(MAX_ADAPTERS, out_size, RANK), empty(MAX_ADAPTERS, len(slices), dtype=torch.float32)
        if len(slices) == 2:
            lora_gated.lora_expand_gated(product, shrunk, b, scales, slices, plan)
        else:
            lora_expand.lora_expand(product, shrunk, b, scales, slices, plan)


@pytest.mark.parametrize(("max_num_seqs", "budget"), [
    (1, 2048), (4, 64), (8, 100), (16, 2048), (32, 2048), (48, 300), (64, 2048), (256, 2048), (512, 8192),
])  # fmt: skip
def test_nothing_is_compiled_while_serving(
    max_num_seqs: int, budget: int, variants: set[tuple[str, tuple[tuple[str, int], ...]]]
) -> None:
    for shape in rehearsed_shapes(max_num_seqs, budget, has_adapters=True):
        if shape.has_adapters:
            run_layer(shape.num_decode + shape.num_prefill)
    rehearsed = set(variants)
    assert {name for name, _ in rehearsed} == {name for _, name in KERNELS}
    missing: dict[int, set[str]] = {}
    for num_tokens in (*range(1, min(budget, 260) + 1), *range(261, budget + 1, 97)):
        before = set(variants)
        run_layer(num_tokens)
        if new := {name for name, _ in variants - before}:
            missing[num_tokens] = new
    assert missing == {}
