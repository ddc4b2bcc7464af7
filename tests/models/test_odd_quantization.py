"""Values of `quantization_config` that are of another kind than they should be: refused by name, or as if absent."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from cb_backend.contracts.errors import ConfigError
from cb_backend.models.quantization import read_quantization
from tests.models.quantised_models import AWQ, FORMATS, GPTQ, compressed, pack_quantized
from tests.models.test_fp8_weights import COMPRESSED, DYNAMIC_FP8

ODD = (None, True, 0, -1, 1.5, "x", "*", "re:*", [], [None], ["re:*"], [[]], {}, {"*": None}, {"+:.*x": None}, {"x": 1})
TRANSFORM = {"config_groups": {"R1": {"apply": [{"targets": ["Linear"], "location": "weight_output"}]}}}
WHOLE: dict[str, dict[str, Any]] = {
    "fp8": {**DYNAMIC_FP8, "fmt": "e4m3", "modules_to_not_convert": ["lm_head"], "ignored_layers": ["a"]},
    "fp8 blocks": {**FORMATS["fp8 blocks"][0], "modules_to_not_convert": ["lm_head"]},
    "awq": {**AWQ, "group_size": 64, "modules_to_not_convert": ["lm_head"]},
    "gptq": {
        **GPTQ, "group_size": 64, "pack_dtype": "int32", "checkpoint_format": "gptq", "lm_head": True,
        "modules_to_not_convert": ["x"], "dynamic": {"-:.*a": {}, "+:.*b": {"bits": 8, "group_size": 64}},
    },
    "compressed-tensors": {**pack_quantized(4, 64), "sparsity_config": {}, "transform_config": TRANSFORM},
    "compressed fp8": dict(COMPRESSED),
    "compressed fp8 blocks": FORMATS["fp8 blocks of compressed-tensors"][0],
    "nvfp4": FORMATS["nvfp4"][0],
    "modelopt": {"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}},
    "modelopt fp8": {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
    "gguf": {"quant_method": "gguf", "modules": {"a": "Q4_K"}, "written_out": {"b": "Q6_K"}},
}  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of everything inside of an object."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield (*path, key)
        yield from places(each, (*path, key))


@pytest.mark.parametrize("name", WHOLE)
def test_whatever_stands_there_is_read_or_refused(name: str) -> None:
    read_quantization(WHOLE[name])
    for path in places(WHOLE[name]):
        for odd in ODD:
            config = copy.deepcopy(WHOLE[name])
            inner = config
            for key in path[:-1]:
                inner = inner[key]
            inner[path[-1]] = odd
            try:
                read_quantization(config)
            except ConfigError:
                continue
            except Exception as error:
                raise AssertionError(f"{'.'.join(map(str, path))} = {odd!r}: {error!r}") from error


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({**GPTQ, "group_size": 64, "dynamic": {"-:*down": {}}}, r"\(gptq\) with the expression '-:\*down', which"),
        ({**GPTQ, "group_size": 64, "dynamic": {"+:.*x": None}}, r"None in dynamic for '\+:\.\*x'"),
        ({**pack_quantized(4, 64), "ignore": ["re:*head"]}, r"the expression 're:\*head', which is none \(nothing to"),
        ({**COMPRESSED, "ignore": ["re:*head"]}, r"the expression 're:\*head'"),
        ({**DYNAMIC_FP8, "weight_block_size": ["a", 128]}, r"a scale a block of \['a', 128\] weights"),
        ({**DYNAMIC_FP8, "weight_block_size": [0, 128]}, r"a scale a block of \[0, 128\] weights"),
        ({**DYNAMIC_FP8, "weight_block_size": [-128, 128]}, r"a scale a block of \[-128, 128\] weights"),
        (compressed({"type": "float", "num_bits": 8, "strategy": "block", "block_structure": [1.5, 128]}), r"\[1.5, "),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_named(config: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        read_quantization(config)


def test_a_format_of_null_is_none_at_all() -> None:
    assert read_quantization({**DYNAMIC_FP8, "fmt": None}) == read_quantization(DYNAMIC_FP8)
