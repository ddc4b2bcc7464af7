"""What a checkpoint's `quantization_config` says: the format of every module, or why it cannot be served.

fp8 with one scale a matrix or an output channel is multiplied in fp8, its inputs quantised token by token whatever the
checkpoint proposes. Everything else keeps 16-bit inputs: weights of 4 and 8 bits, fp8 with a scale a block. What a
configuration asks for and nobody here does is refused by its name and value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from cb_backend.contracts.errors import ConfigError
from cb_backend.layers.weight_format import (
    Fp8Format,
    ModuleFormats,
    PackedFormat,
    PlainFormat,
    PlainUnlessPacked,
    WeightFormat,
)
from cb_backend.models.compressed_tensors import read_compressed_tensors
from cb_backend.models.gguf_blocks import BLOCK_KINDS
from cb_backend.models.packed_formats import (
    AwqReader,
    Fp8BlockReader,
    GgufReader,
    GptqReader,
    Mxfp4BlocksReader,
    Nvfp4Reader,
)
from cb_backend.models.quantization_fields import (
    FP8,
    HEAD,
    Quantization,
    UnsupportedError,
    bits_of,
    block_of,
    ending,
    exactly,
    group_of,
    in_fp8,
    names_of,
    packed,
    starting,
)

# What vLLM calls a method whose kernels it chooses by itself.
SYNONYMS = {"awq_marlin": "awq", "gptq_marlin": "gptq", "modelopt_fp4": "modelopt"}
SUPPORTED = (
    "supported are float32, float16 and bfloat16 safetensors; fp8 with a scale a tensor, channel or block; AWQ, GPTQ"
    " and compressed-tensors of 4 and 8 bits; nvfp4 and mxfp4; and GGUF. Use another quantisation of the model, or the"
    " unquantised one with the engine argument quantization 'fp8'"
)
# Where a `config.json` may have it: the second is what compressed-tensors wrote in 2024, the last is MLX's.
KEYS = ("quantization_config", "compression_config", "quantization")


def quantization_values(values: Mapping[str, Any]) -> Any:
    """What of a `config.json` tells how its checkpoint is quantised; None: nothing does.

    Under the names that are not everybody's only an object does: others note a word there that means nothing here.
    """
    for key in KEYS:
        value = values.get(key)
        if value and (key == KEYS[0] or isinstance(value, dict)):
            return value
    return None


def read_quantization(config: Any, where: str = "config.json") -> Quantization | None:
    """None for a checkpoint that is not quantised. Raises `ConfigError` that names method and reason."""
    if not config:
        return None
    if not isinstance(config, dict):
        raise ConfigError(f"{where}: 'quantization_config' must be an object, found {config!r}")
    method = config.get("quant_method", _method_by_its_keys(config))
    reader = METHODS.get(method) if isinstance(method, str) else None
    try:
        if reader is None:
            raise UnsupportedError("")
        return reader(config)
    except UnsupportedError as error:
        reason = f" with {error}" if str(error) else ""
        raise ConfigError(f"the checkpoint is quantised ({method}){reason}; {SUPPORTED}") from None


def _method_by_its_keys(config: dict[str, Any]) -> str:
    """Of a configuration that names none, as some writers' do."""
    if "quant_algo" in config:
        return "modelopt"
    if isinstance(config.get("config_groups"), dict):
        return "compressed-tensors"
    if config.get("load_in_4bit") or config.get("load_in_8bit"):
        return "bitsandbytes"
    return "MLX's way" if config.keys() >= {"bits", "group_size"} else "unknown"


def module_formats(quantization: str | None) -> ModuleFormats:
    """The formats of a model's modules: fp8, or as they come."""
    return ModuleFormats(Fp8Format() if quantization == FP8 else PlainFormat(), [(HEAD, PlainFormat())])


def _read_fp8(config: dict[str, Any]) -> Quantization:
    if (config.get("fmt") or "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise UnsupportedError(f"numbers of the format {config['fmt']!r}")
    kept = names_of(config, "ignored_layers", "modules_to_not_convert")
    block = config.get("weight_block_size")
    if block:
        return packed("fp8_blocks", Fp8BlockReader(block_of(block)), [HEAD, *map(ending, kept)])
    return in_fp8((name, ending(name)) for name in kept)


def _read_awq(config: dict[str, Any]) -> Quantization:
    for key in ("version", "format", "checkpoint_format"):  # as writers of different years call it
        if str(config.get(key) or "gemm").lower() != "gemm":
            raise UnsupportedError(f"{key} {config[key]!r}")
    if config.get("zero_point", True) is not True:
        raise UnsupportedError(f"zero_point {config['zero_point']!r}")
    bits_of(config, "bits" if "bits" in config else "w_bit", (4,))  # its own name for it
    # Parts of names, in AWQ, which has no quantised head. Writers mean fewer modules by them than they match: `gate` a
    # mixture's router alone, and not gate_proj.
    named = [f".*{re.escape(name)}.*" for name in names_of(config, "modules_to_not_convert")]
    others = [(pattern, PlainUnlessPacked()) for pattern in named]
    group = group_of(config, 4, "group_size", "q_group_size")
    if group == -1:
        raise UnsupportedError("group_size -1")
    return packed("awq", AwqReader(group), [HEAD], others)


def _read_gptq(config: dict[str, Any]) -> Quantization:
    key = next((name for name in ("checkpoint_format", "format") if config.get(name) is not None), "format")
    form = config.get(key, "gptq")
    if form not in ("gptq", "gptq_v2"):
        raise UnsupportedError(f"{key} {form!r}")
    if config.get("is_marlin_format"):
        raise UnsupportedError("is_marlin_format true")
    if config.get("pack_dtype", "int32") != "int32":
        raise UnsupportedError(f"pack_dtype {config['pack_dtype']!r}")

    def reader(settings: dict[str, Any]) -> GptqReader:
        merged = {**config, **settings}
        bits = bits_of(merged, "bits", (4, 8))
        group, is_symmetric = group_of(merged, bits, "group_size"), bool(merged.get("sym", True))
        # Groups that were fixed beforehand, and one alone, lie as they did whatever order the quantising took.
        is_ordered = bool(merged.get("desc_act")) and not merged.get("static_groups") and group != -1
        return GptqReader(bits, group, is_symmetric, form == "gptq_v2", is_ordered)

    kept = [] if config.get("lm_head") else [HEAD]
    others: list[tuple[str, WeightFormat]] = []  # the first that matches decides, as in GPTQModel
    dynamic = config.get("dynamic") or {}
    if not isinstance(dynamic, dict):
        raise UnsupportedError(f"dynamic {dynamic!r}")
    for pattern, settings in dynamic.items():
        wanted = starting(pattern.removeprefix("-:").removeprefix("+:"), pattern)
        if pattern.startswith("-:"):
            others.append((wanted, PlainFormat()))
        elif isinstance(settings, dict):
            others.append((wanted, PackedFormat(reader(settings))))
        else:
            raise UnsupportedError(f"{settings!r} in dynamic for {pattern!r}")
    return packed("gptq", reader({}), [*kept, *map(ending, names_of(config, "modules_to_not_convert"))], others)


def _read_modelopt(config: dict[str, Any]) -> Quantization:
    inner = config.get("quantization")  # where hf_quant_config.json has it all
    config = {**config, **inner} if isinstance(inner, dict) else config
    algorithm = config.get("quant_algo")
    names = names_of(config, "ignore", "exclude_modules")
    kept = [re.escape(name).replace(r"\*", ".*") for name in names]
    if algorithm in ("NVFP4", "W4A16_NVFP4"):
        return packed("modelopt", Nvfp4Reader(is_modelopt=True), kept)
    if algorithm == "FP8":
        return in_fp8(zip(names, kept, strict=True))
    raise UnsupportedError(f"quant_algo {algorithm!r}")


def _read_gguf(config: dict[str, Any]) -> Quantization:
    """As `gguf.conversion` says it of a file's matrices."""
    modules = config.get("modules")
    if not isinstance(modules, dict) or not modules:
        raise UnsupportedError("no 'modules', which the conversion of a .gguf file lists; name that file as the model")
    by_kind: dict[str, list[str]] = {}
    for module, kind in modules.items():
        if not isinstance(kind, str) or kind not in BLOCK_KINDS:
            raise UnsupportedError(f"{module} of the kind {kind!r}")
        by_kind.setdefault(kind, []).append(exactly(module))
    usual = max(by_kind, key=lambda kind: len(by_kind[kind]))
    others = [("|".join(names), PackedFormat(GgufReader(kind))) for kind, names in by_kind.items() if kind != usual]
    written_out = config.get("written_out") or {}
    if not isinstance(written_out, dict):
        raise UnsupportedError(f"written_out {written_out!r}")
    plain = [exactly(module) for module in written_out]
    kept = [] if "lm_head" in modules else [HEAD]
    return packed("gguf", GgufReader(usual), [*kept, *plain], others)


def _read_mxfp4(config: dict[str, Any]) -> Quantization:
    """The experts, whatever else stands in the configuration: the writer converts nothing but them."""
    experts = [(r".*\.experts(\..*)?", PackedFormat(Mxfp4BlocksReader()))]
    return Quantization("mxfp4", ModuleFormats(PlainFormat(), experts))


METHODS: dict[str, Callable[[dict[str, Any]], Quantization]] = {
    "fp8": _read_fp8,
    "awq": _read_awq,
    "gptq": _read_gptq,
    "compressed-tensors": read_compressed_tensors,
    "modelopt": _read_modelopt,
    "mxfp4": _read_mxfp4,
    "gguf": _read_gguf,
}
