"""What a checkpoint's files tell of the formats of its modules, where its configuration does not or tells otherwise.

Configurations name modules as they are in a writer's memory, as they are saved, by parts of names or not at all; the
tensors that are there leave no doubt.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from cb_backend.layers.layer_spec import MoESpec
from cb_backend.layers.weight_format import ModuleFormats, PackedFormat, PlainFormat, WeightFormat
from cb_backend.models.compressed_tensors import with_zeros_apart
from cb_backend.models.packed_formats import GptqReader
from cb_backend.models.spec import ModelSpec
from cb_backend.models.weights import FLOAT_TYPES, CheckpointFiles

logger = logging.getLogger("cb_backend.models")


def as_in_files(told: ModuleFormats, spec: ModelSpec, source: CheckpointFiles) -> ModuleFormats:
    """The formats of a quantised checkpoint's modules, from what its configuration says and its files hold."""
    told = told.in_files(source.has_scales)
    if any(name.endswith(".weight_zero_point") and each.dtype == "I8" for name, each in source.tensors.items()):
        told = told.changed(with_zeros_apart)
    if not any(name.endswith(".g_idx") for name in source.tensors):
        told = told.changed(_without_group_index)
    plain = [module for module in _plain_modules(spec, source) if not isinstance(told(module), PlainFormat)]
    if not plain:
        return told
    # Of the head it needs no word: what is said of all linear layers need not be meant of it.
    if others := [module for module in plain if module != spec.names.head_module]:
        logger.info(
            "%d modules are unquantised in the files, though quantization_config does not leave them out, and are "
            "served as they are: %s%s",
            len(others), ", ".join(others[:3]), ", ..." if len(others) > 3 else "",
        )  # fmt: skip
    return told.with_plain(plain)


def _without_group_index(weight_format: WeightFormat) -> WeightFormat:
    """Of GPTQ files that do not tell the groups of inputs, where these are in their own order."""
    reader = weight_format.reader if isinstance(weight_format, PackedFormat) else None
    if not isinstance(reader, GptqReader) or reader.has_group_order:
        return weight_format
    return PackedFormat(replace(reader, has_group_index=False))


def _plain_modules(spec: ModelSpec, source: CheckpointFiles) -> list[str]:
    """Modules with a matrix of 16 or more bits, and nothing beside it that tells of fewer."""
    mixtures = [layer.mlp for layer in spec.layers if isinstance(layer.mlp, MoESpec)]
    routers = {name for mixture in mixtures for name in (mixture.names.router, mixture.names.shared_gate)}
    modules = [
        name.removesuffix(".weight")
        for name, stored in source.tensors.items()
        if name.endswith(".weight") and stored.dtype in FLOAT_TYPES and len(stored.shape) > 1
    ]
    # gpt-oss has all experts' matrices in one tensor, whose name is the module's.
    whole = [each.names for each in mixtures if each.storage == "interleaved"]
    stacks = {name for names in whole for name in (names.gate, names.down)}
    modules += [
        name
        for name, stored in source.tensors.items()
        if stored.dtype in FLOAT_TYPES and len(stored.shape) == 3 and name.rpartition(".")[2] in stacks
    ]
    layers, head = f"{spec.names.prefix}layers.", spec.names.head_module
    return [
        module
        for module in modules
        if not source.has_scales(module)
        and (
            module == head
            or (module.startswith(layers) and not any(module.endswith(f".{router}") for router in routers))
        )
    ]
