"""Which adapters a folder names, and what of each would be refused: read the way an engine does, without one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from cb_backend.cli.paths import CliError
from cb_backend.contracts.config import EngineConfig
from cb_backend.contracts.errors import ConfigError, UnavailableError
from cb_backend.layers.adapter_table import AdapterTable
from cb_backend.models.checkpoint import find_checkpoint
from cb_backend.models.gguf.outline import outline_gguf
from cb_backend.models.lora_checkpoint import check_adapter, read_adapter
from cb_backend.models.lora_config import read_lora_config
from cb_backend.models.registry import outline_adapters, read_model_config, resolve_dtype
from cb_backend.models.spec import ModelSpec
from cb_backend.models.weights import refuse
from cb_backend.support.adapter_files import CONFIG_NAME, LIST_NAME, folder_stamp, read_adapter_list
from cb_backend.support.native_paths import native_path
from cb_backend.support.version_folder import adapter_models, engine_folder, load_engine_config, own_adapter

_GPU = torch.device("cuda")  # what is decided by the kind of device alone: none is asked


@dataclass(slots=True)
class AdapterFindings:
    """One adapter. What could not be found out is None, and a refusal says why."""

    name: str
    named_by: str  # a file, or a model of its own
    folder: str
    refusals: list[str] = field(default_factory=list)
    rank: int | None = None  # adapter_config.json's
    num_modules: int | None = None
    file_bytes: int | None = None
    mtime_ns: int | None = None

    def refuse(self, fault: str) -> None:
        if fault not in self.refusals:
            self.refusals.append(fault)


class AdapterModel(NamedTuple):
    """A model with adapters, by its version folder; None: adapters without one."""

    version: Path | None
    config: EngineConfig
    adapters: list[AdapterFindings]


def find_models(folder: Path) -> list[Path]:
    """Version folders of the models that a folder means: a repository, a model or a version of one; those of a
    repository that have adapters. Raises `CliError`."""
    if (folder / "model.json").is_file():
        return [_engine(folder)]
    if versions := _versions(folder):
        return [_engine(versions[-1])]
    found = [versions[-1] for model in sorted(folder.iterdir()) if model.is_dir() and (versions := _versions(model))]
    engines = dict.fromkeys(_engine(version) for version in found)
    enabled = [engine for engine in engines if load_engine_config(engine / "model.json").enable_lora]
    if not enabled:
        raise CliError(
            f"{folder} holds no model with enable_lora in its model.json, and is no adapter ({CONFIG_NAME} is missing)"
        )
    return enabled


def adapters_of(version: Path) -> AdapterModel:
    """Of a model: those of its list, and the models that are adapters. Raises `ConfigError`."""
    config = load_engine_config(version / "model.json")
    named = [(name, LIST_NAME, folder) for name, folder in _listed(version, config)]
    for model in adapter_models(version):
        own = own_adapter(_versions(version.parent.parent / native_path(model))[-1])
        if own is not None:
            named.append((model, f"model {model}", own))
    return AdapterModel(version, config, [look_at(name, by, folder) for name, by, folder in named])


def look_at(name: str, named_by: str, folder: Path) -> AdapterFindings:
    """What an adapter's files say of themselves."""
    found = AdapterFindings(name, named_by, str(folder))
    if not folder.is_dir():
        found.refuse(f"the folder {folder} is not there")
        return found
    if (stamp := folder_stamp(folder)) is not None:
        found.file_bytes, found.mtime_ns = stamp.size, stamp.mtime_ns
    try:
        found.rank = read_lora_config(folder).rank
    except ConfigError as error:
        found.refuse(str(error))
    return found


def table_of(config: EngineConfig) -> tuple[ModelSpec, AdapterTable]:
    """The model that adapters are for, and where they would go on each device. Raises `CliError`, `ConfigError`."""
    if not native_path(config.model).expanduser().exists():
        raise CliError(f"the checkpoint {config.model!r} is not on this machine; name its folder with --model")
    path = find_checkpoint(config.model)
    spec = outline_gguf(path, refuse).spec if path.is_file() else read_model_config(path)
    if spec is None:
        raise CliError(f"what {config.model} is cannot be told; see `cb-backend check`")
    dtype = resolve_dtype(config.dtype, spec, _GPU)
    return spec, outline_adapters(spec, dtype, config.max_lora_rank, config.tensor_parallel_size)


def examine(found: AdapterFindings, spec: ModelSpec, table: AdapterTable) -> None:
    """Add everything that an engine would refuse the adapter for; its numbers are read where nothing else is wrong.

    table: of whole adapters.
    """
    if found.file_bytes is None and found.refusals:
        return
    folder = Path(found.folder)
    try:
        check_adapter(folder, spec, table, found.refuse)
        if not found.refusals:
            found.num_modules = read_adapter(folder, spec, table).num_modules
    except (ConfigError, UnavailableError) as error:
        found.refuse(str(error))


def _listed(version: Path, config: EngineConfig) -> Iterator[tuple[str, Path]]:
    """Also of a list beside a model that does not take adapters yet: it is looked at before it is enabled."""
    if config.enable_lora or (version / LIST_NAME).is_file():
        yield from read_adapter_list(version / LIST_NAME).items()


def _engine(version: Path) -> Path:
    try:
        return engine_folder(version)
    except ConfigError as error:
        raise CliError(f"{error} (in {version})") from None


def _versions(model: Path) -> list[Path]:
    """Version folders with engine arguments, the newest last."""
    found = [path for path in model.glob("*") if path.name.isdigit() and (path / "model.json").is_file()]
    return sorted(found, key=lambda path: int(path.name))
