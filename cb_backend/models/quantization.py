"""What a checkpoint's `quantization_config` says, and whether it is something that can be served.

Served is fp8 (e4m3) with one scale a matrix or one an output channel, as two conventions write it: `fp8` and
`compressed-tensors`. Inputs are quantised dynamically, token by token, whatever the checkpoint proposes: scales it
brings for them are not needed.
"""

from __future__ import annotations

from typing import Any

from cb_backend.errors import ConfigError
from cb_backend.layers.weight_format import Fp8Format, ModuleFormats, PlainFormat

FP8 = "fp8"
_SUPPORTED = "supported are float32, float16 and bfloat16 safetensors, fp8 with a scale a tensor or a channel, and GGUF"
_KEPT = ("lm_head",)  # modules that may be left as they are: those that this backend does not quantise


def read_quantization(config: Any, where: str = "config.json") -> str | None:
    """`fp8`, or None for a checkpoint that is not quantised. Raises `ConfigError` that names method and reason."""
    if not config:
        return None
    if not isinstance(config, dict):
        raise ConfigError(f"{where}: 'quantization_config' must be an object, found {config!r}")
    method = config.get("quant_method", "unknown")
    readers = {"fp8": _unsupported_in_fp8, "compressed-tensors": _unsupported_in_compressed_tensors}
    if method not in readers:
        raise ConfigError(f"the checkpoint is quantised ({method}); {_SUPPORTED}")
    reason = readers[method](config)
    if reason is not None:
        raise ConfigError(f"the checkpoint is quantised ({method}) with {reason}; {_SUPPORTED}")
    return FP8


def module_formats(quantization: str | None) -> ModuleFormats:
    """The formats of a model's modules: fp8, or as they come."""
    return ModuleFormats(Fp8Format() if quantization == FP8 else PlainFormat())


def _unsupported_in_fp8(config: dict[str, Any]) -> str | None:
    if config.get("weight_block_size"):
        return f"a scale a block of {config['weight_block_size']} weights"
    if config.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        return f"numbers of the format {config['fmt']!r}"
    return _kept_too_much(config.get("ignored_layers") or config.get("modules_to_not_convert") or [])


def _unsupported_in_compressed_tensors(config: dict[str, Any]) -> str | None:
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        return f"{len(groups) if isinstance(groups, dict) else 'no'} groups of layers"
    group = next(iter(groups.values()))
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict) or group.get("targets") != ["Linear"]:
        return "something else than all linear layers as its group"
    if (weights.get("type"), weights.get("num_bits")) != ("float", 8):
        return f"{weights.get('num_bits')}-bit {weights.get('type')} weights"
    if weights.get("strategy") not in ("tensor", "channel"):
        return f"a scale a {weights.get('strategy')}"
    inputs = group.get("input_activations")
    if not isinstance(inputs, dict) or (inputs.get("type"), inputs.get("num_bits")) != ("float", 8):
        return "fp8 weights but other inputs"
    return _kept_too_much(config.get("ignore") or [])


def _kept_too_much(kept: Any) -> str | None:
    names = [name for name in kept if name not in _KEPT] if isinstance(kept, list) else [repr(kept)]
    return f"{names[0]} left out" if names else None
