"""Adapters as PEFT saves them: `adapter_config.json` and `adapter_model.safetensors`, packed as the device has them.

Every tensor has its place in the model or is refused by its name: an adapter is never served in part. Ranks below the
table's are filled up with zeros, modules without weights are zeros. Pickled files are never read.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from cb_backend.contracts.errors import ConfigError, UnavailableError
from cb_backend.layers.adapter_table import AdapterSite, AdapterTable
from cb_backend.models.lora_config import LoraConfig, read_lora_config
from cb_backend.models.safetensors_files import StoredTensor, read_header
from cb_backend.models.spec import ModelSpec
from cb_backend.models.weight_reader import Read, read_tensors
from cb_backend.models.weights import Complain, refuse
from cb_backend.support.adapter_files import CONFIG_NAME, WEIGHTS_NAME, Stamp, folder_stamp

KEY_BYTES = 16
_PIECE_BYTES = 4 << 20
_HASH_THREADS, _READ_THREADS = 4, 2
_MOST_READS = 3  # of a folder that changes while it is read
_MOST_SCALE = torch.finfo(torch.float32).max
_WRAPPING = "base_model.model."  # PEFT's own, before the names of the model's modules
_TENSOR = re.compile(r"(?P<module>.+)\.lora_(?P<half>[AB])\.weight")
_EMBEDDING_OR_HEAD = re.compile(r"(^|\.)(embed_tokens|lm_head)(\.|$)")
# As the families call it: qwen's and glm's, mixtral's, granite's, gpt-oss's. (`gate_proj` is none.)
_ROUTER = re.compile(r"\.(mlp|block_sparse_moe)\.(gate|router|router\.layer)(\.(lora_|base_layer)|$)")
_FLOATS = ("F64", "F32", "F16", "BF16")
# What the model around a decoder calls it; a family's names may say more.
_PREFIXES = ("model.", "model.language_model.", "language_model.model.")


class PackedAdapter(NamedTuple):
    """An adapter as a row of the slab."""

    key: bytes  # of the data: the same weights and scales have the same
    data: Tensor  # uint8 [bytes_per_adapter] on the CPU, pinned where the slab is on a GPU
    rank: int  # the largest of its modules'
    num_modules: int
    stamp: Stamp | None = None  # of the files that it was read from

    @property
    def nbytes(self) -> int:
        return self.data.nbytes


class _Half(NamedTuple):
    """A tensor of the file, and where it goes."""

    stored: StoredTensor
    module: str  # its name in the adapter
    is_b: bool
    site: AdapterSite
    part: int  # index of the slice


def read_adapter(
    folder: Path, spec: ModelSpec, table: AdapterTable, new_memory: Callable[[], Tensor] | None = None
) -> PackedAdapter:
    """The adapter, as a row of `table`'s slab, in `new_memory` of zeros; None: in memory of the table's. Config and
    weights are of one state of the folder: where it changes meanwhile, it is read again.

    table: of whole adapters (`AdapterTable.whole`). Raises `ConfigError` that names file, field or tensor, and value,
    for what `check_adapter` complains of, and for numbers that are not finite in the table's dtype; `UnavailableError`
    for files that do not stop to change. Raises `MemoryError`.
    """
    data = (new_memory or table.new_host_memory)()
    for _ in range(_MOST_READS):
        stamp = folder_stamp(folder)
        try:
            packed = _read_once(folder, spec, table, data)
        except ConfigError:
            if folder_stamp(folder) == stamp:
                raise
        else:
            if folder_stamp(folder) == stamp:
                return packed._replace(stamp=stamp)
        data.zero_()
    raise UnavailableError(
        f"its files have changed {_MOST_READS} times while they were read; write them into a new folder, and name that"
    )


def _read_once(folder: Path, spec: ModelSpec, table: AdapterTable, data: Tensor) -> PackedAdapter:
    config, halves = _checked(folder, spec, table, refuse)
    reads = [Read(half.stored.name, half.stored, take=_taking(half, data, table.rank)) for half in halves]
    read_tensors(reads, data.device, num_lanes=_READ_THREADS)
    if not is_finite(data, table.dtype):
        _refuse_not_finite(halves, data, table.rank)
    for half in halves:
        half.site.weights(data)[2][half.part] = config.scale_of(half.module)
    return PackedAdapter(content_key(data), data, max(config.rank_of(half.module) for half in halves), len(halves) // 2)


def is_finite(data: Tensor, dtype: torch.dtype) -> bool:
    """Of memory that holds numbers of one type and zeros: all at once, for an adapter has hundreds of tensors."""
    bits = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    infinity = int(torch.tensor(torch.inf, dtype=dtype).view(bits))
    pieces = data.view(bits).split(_PIECE_BYTES // dtype.itemsize)
    return all(int((piece & torch.iinfo(bits).max).max()) < infinity for piece in pieces)  # without their signs


def content_key(data: Tensor) -> bytes:
    """blake2b over the digests of pieces, which several threads make."""
    pieces = [piece.numpy().data for piece in data.split(_PIECE_BYTES)]
    with ThreadPoolExecutor(_HASH_THREADS) as pool:
        digests = pool.map(lambda piece: hashlib.blake2b(piece).digest(), pieces)
    return hashlib.blake2b(b"".join(digests), digest_size=KEY_BYTES).digest()


def check_adapter(folder: Path, spec: ModelSpec, table: AdapterTable, complain: Complain = refuse) -> None:
    """Complains of what cannot be served in the adapter's config and in the header of its weights.

    table: of whole adapters; it may be on the device "meta". Raises `ConfigError` for files that cannot be read.
    """
    _checked(folder, spec, table, complain)


def _checked(folder: Path, spec: ModelSpec, table: AdapterTable, complain: Complain) -> tuple[LoraConfig, list[_Half]]:
    config = read_lora_config(folder)
    path = folder / WEIGHTS_NAME
    if not path.is_file():
        pickled = (folder / "adapter_model.bin").is_file()
        why = (
            "adapter_model.bin is pickled and may run code; save it with safe_serialization=True"
            if pickled
            else ("name a folder that PEFT's save_pretrained made")
        )
        raise ConfigError(f"{WEIGHTS_NAME} is missing in the adapter's folder; {why}")
    modules = {_within(name, spec): place for name, place in table.modules.items()}
    halves = [half for stored in read_header(path) if (half := _placed(stored, spec, modules, complain)) is not None]
    if not halves:
        complain(f"{WEIGHTS_NAME} holds no weights of an adapter")
    placed: dict[tuple[AdapterSite, int, bool], _Half] = {}
    for half in halves:
        _check_shape(half, config, table, complain)
        if not abs(scale := config.scale_of(half.module)) <= _MOST_SCALE:
            complain(f"{CONFIG_NAME}: the scale of {half.module} is {scale}, beyond float32; lower its lora_alpha")
        first = placed.setdefault((half.site, half.part, half.is_b), half)
        if first is not half:
            names = f"{first.stored.name} and {half.stored.name}"
            complain(f"{WEIGHTS_NAME}: tensors {names} are for one place of the model; save the adapter again")
    found = {(half.module, half.is_b) for half in halves}
    for module, is_b in sorted(found):
        if (module, not is_b) not in found:
            complain(f"{WEIGHTS_NAME}: {module} has lora_{'AB'[is_b]} but no lora_{'BA'[is_b]}; save the adapter again")
    return config, halves


def _placed(
    stored: StoredTensor, spec: ModelSpec, modules: dict[str, tuple[AdapterSite, int]], complain: Complain
) -> _Half | None:
    """Where a tensor goes; None, with a complaint, for one that has no place."""
    name = stored.name.removeprefix(_WRAPPING)
    match = _TENSOR.fullmatch(name)
    if match is None and (why := _part_without_adapters(name)):  # before its form: PEFT saves those in one of their own
        complain(f"{WEIGHTS_NAME}: tensor {stored.name} {why}")
        return None
    if match is None:
        complain(
            f"{WEIGHTS_NAME}: tensor {stored.name} is not one of a plain adapter (lora_A, lora_B): merge it instead"
        )
        return None
    module = match["module"]
    place = modules.get(_within(module, spec))
    if place is None:
        complain(f"{WEIGHTS_NAME}: tensor {stored.name} {_why_no_place(module)}")
        return None
    if stored.dtype not in _FLOATS:
        complain(f"{WEIGHTS_NAME}: tensor {stored.name} is {stored.dtype}; supported are {', '.join(_FLOATS)}")
        return None
    return _Half(stored, module, match["half"] == "B", *place)


def _within(module: str, spec: ModelSpec) -> str:
    """A module's name within the decoder: `layers.3.self_attn.q_proj`."""
    prefixes = {spec.names.prefix, *(names.prefix for names in spec.other_names), *_PREFIXES}
    return next((rest for rest in _without(module, prefixes) if rest.startswith("layers.")), module)


def _without(name: str, prefixes: set[str]) -> Iterator[str]:
    yield name
    yield from (name.removeprefix(prefix) for prefix in prefixes)


def _why_no_place(module: str) -> str:
    return _part_without_adapters(module) or (
        f"is of {module}, which is no projection of this model's layers: the adapter is of another model, or must be "
        "merged"
    )


def _part_without_adapters(name: str) -> str | None:
    """What to tell of a tensor or module in a part of the model that takes no adapters; None for any other."""
    if ".experts." in f".{name}.":
        return "is of experts, whose matrices take no adapters; train the adapter on the other modules, or merge it"
    if _EMBEDDING_OR_HEAD.search(name):
        return "is of the embedding or the head, which take no adapters; train it on the layers alone, or merge it"
    if _ROUTER.search(name):
        return "is of the router of experts, which takes no adapter; train it on the other modules, or merge it"
    return None


def _check_shape(half: _Half, config: LoraConfig, table: AdapterTable, complain: Complain) -> None:
    name, shape = half.stored.name, list(half.stored.shape)
    module = half.site.modules[half.part]
    rank = config.rank_of(half.module)
    wanted = [module.out_size, rank] if half.is_b else [rank, module.in_size]
    if rank > table.max_rank:
        complain(
            f"{WEIGHTS_NAME}: {half.module} has rank {rank}, above max_lora_rank {table.max_rank}; raise max_lora_rank "
            "in model.json"
        )
    elif shape != wanted:
        complain(f"{WEIGHTS_NAME}: tensor {name} has shape {shape}, the model and adapter_config.json ask for {wanted}")


def _taking(half: _Half, data: Tensor, rank: int) -> Callable[[Tensor], None]:
    """What takes a tensor of the file into an adapter's memory."""
    a, b, _ = half.site.weights(data)
    module = half.site.modules[half.part]

    def take(tensor: Tensor) -> None:
        if half.is_b:
            target = b[module.rows, : tensor.shape[1]]
            target.copy_(tensor if module.reorder is None else module.reorder(tensor))
        else:
            target = a[half.part * rank :][: tensor.shape[0]]
            target.copy_(tensor)

    return take


def _refuse_not_finite(halves: list[_Half], data: Tensor, rank: int) -> None:
    for half in halves:
        a, b, _ = half.site.weights(data)
        target = b[half.site.modules[half.part].rows] if half.is_b else a[half.part * rank :][:rank]
        if not bool(target.isfinite().all()):
            raise ConfigError(
                f"{WEIGHTS_NAME}: tensor {half.stored.name} holds numbers that are not finite (in "
                f"{str(target.dtype).removeprefix('torch.')}); train or save the adapter again"
            )
