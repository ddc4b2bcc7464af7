"""What the readers of `quantization_config` have in common: parts of it checked, and how modules are named there."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from cb_backend.kernels.packed import MIN_GROUP
from cb_backend.layers.stored_matrix import StoredReader
from cb_backend.layers.weight_format import Fp8Format, ModuleFormats, PackedFormat, PlainFormat, WeightFormat

FP8 = "fp8"
HEAD = r"(.*\.)?lm_head"
# Modules that are plain where all others are fp8, whether they are named or not: the head, and routers.
_NEVER_FP8 = re.compile(r"lm_head|(re:)?.*\b(mlp|block_sparse_moe)\\?\.(gate|router|shared_expert_gate)\$?")
# Scales that checkpoints bring for inputs, which are not quantised here, or by themselves.
INPUTS = r".*\.(input_scale|input_global_scale|input_zero_point)"


class Quantization(NamedTuple):
    """How a checkpoint's matrices are stored."""

    name: str  # fp8 | the method's name
    formats: ModuleFormats | None  # None: all modules in fp8 with a scale a tensor or channel


class UnsupportedError(Exception):
    """What of a configuration is not supported."""


def in_fp8(kept: Iterable[tuple[str, str]]) -> Quantization:
    """fp8 with a scale a tensor or channel, but for modules that are left as they are. kept: (name in the
    configuration, regular expression of the modules that are meant).
    """
    patterns = [pattern for name, pattern in kept if not _NEVER_FP8.fullmatch(name)]
    if not patterns:
        return Quantization(FP8, None)
    return Quantization(FP8, ModuleFormats(Fp8Format(), [(each, PlainFormat()) for each in (HEAD, *patterns)]))


def packed(
    name: str, reader: StoredReader, kept: Sequence[str], others: Sequence[tuple[str, WeightFormat]] = ()
) -> Quantization:
    """All modules in one format, but for those that match one of `kept` and those that have another."""
    exceptions = [*((pattern, PlainFormat()) for pattern in kept), *others]
    return Quantization(name, ModuleFormats(PackedFormat(reader), exceptions, INPUTS))


def names_of(config: dict[str, Any], *keys: str) -> list[str]:
    """The first of these lists that is there. Raises `UnsupportedError` for what is no list of names."""
    for key in keys:
        value = config.get(key)
        if value is None:
            continue
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise UnsupportedError(f"{key} {value!r}")
        return value
    return []


def bits_of(config: dict[str, Any], key: str, allowed: tuple[int, ...]) -> int:
    bits = config.get(key)
    if bits not in allowed:
        raise UnsupportedError(f"{key} {bits!r}")
    return int(bits)


def group_of(config: dict[str, Any], bits: int, *keys: str) -> int:
    """Weights that share a scale; -1: all of an output's."""
    group = next((config[key] for key in keys if config.get(key) is not None), -1)
    if not isinstance(group, int) or group not in (-1, 32, 64, 128, 256, 512, 1024):
        raise UnsupportedError(f"{keys[0]} {group!r}")
    if -1 < group < MIN_GROUP["int4" if bits == 4 else "int8"]:
        raise UnsupportedError(f"{bits} bits in groups of {group}")
    return group


def block_of(block: Any) -> tuple[int, int]:
    """(rows, columns) of weights that share a scale. Raises `UnsupportedError` unless 128 columns do."""
    if not isinstance(block, list) or [type(size) for size in block] != [int, int] or block[0] < 1 or block[1] != 128:
        raise UnsupportedError(f"a scale a block of {block} weights")
    return block[0], block[1]


def starting(pattern: str, given: str) -> str:
    """Modules whose names begin as an expression says. Raises `UnsupportedError` for what is no expression; given: as
    it stands in the configuration.
    """
    whole = f"(?:{pattern}).*"
    try:
        re.compile(whole)
    except re.error as error:
        raise UnsupportedError(f"the expression {given!r}, which is none ({error.msg})") from None
    return whole


def exactly(name: str) -> str:
    return re.escape(name)


def ending(name: str) -> str:
    """Modules whose names end so, and what is inside of them."""
    return rf"(.*\.)?{re.escape(name)}(\..*)?"
