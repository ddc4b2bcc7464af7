"""`cb-backend adapters list|check DIR`: which adapters a model names, and what an engine would refuse of them.

No server is asked and no GPU is needed. Exit codes: 0 all would be served, 1 one would not, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from cb_backend.cli.adapter_findings import (
    AdapterFindings,
    AdapterModel,
    adapters_of,
    examine,
    find_models,
    look_at,
    table_of,
)
from cb_backend.cli.check_report import first_of
from cb_backend.cli.paths import CliError
from cb_backend.contracts.adapters import DEFAULT_MAX_LORAS
from cb_backend.contracts.config import EngineConfig
from cb_backend.front_end.adapters import with_places
from cb_backend.kv_cache.storage import show_bytes
from cb_backend.support.adapter_files import CONFIG_NAME
from cb_backend.support.native_paths import native_path

EXIT_SERVED, EXIT_REFUSED = 0, 1
MOST_REFUSALS = 5  # of one adapter that are printed; JSON has all


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s {list,check} DIR [options]"
    parser.add_argument(
        "action", choices=("list", "check"), help="list: names and files; check: what an engine would refuse, and why"
    )
    parser.add_argument("folder", metavar="DIR", help="a model repository, a model in it, or the folder of one adapter")
    parser.add_argument(
        "--model", metavar="CHECKPOINT", help="what the adapters are for, instead of model.json's model"
    )
    parser.add_argument("--max-lora-rank", type=int, metavar="RANK", help="instead of model.json's")
    parser.add_argument("--json", action="store_true", help="everything, for programs")


def run(args: argparse.Namespace) -> int:
    folder = native_path(args.folder).expanduser()
    if not folder.is_dir():
        args.command_parser.error(f"{args.folder!r} is no folder")
    models = [_changed(model, args) for model in _models(folder, args)]
    sizes = [_check(model) if args.action == "check" else None for model in models]
    if args.json:
        print(json.dumps([_as_json(model, size) for model, size in zip(models, sizes, strict=True)], indent=2))
    else:
        for model, size in zip(models, sizes, strict=True):
            print("\n".join(_report(model, size)))
    are_served = all(not adapter.refusals for model in models for adapter in model.adapters)
    return EXIT_SERVED if are_served or args.action == "list" else EXIT_REFUSED


def _models(folder: Path, args: argparse.Namespace) -> list[AdapterModel]:
    if not (folder / CONFIG_NAME).is_file():
        return [adapters_of(version) for version in find_models(folder)]
    if args.action == "check" and args.model is None:
        raise CliError(f"{folder} is one adapter; say with --model which checkpoint it is for")
    config = EngineConfig(model=args.model or "none", enable_lora=True)
    return [AdapterModel(None, config, [look_at(folder.absolute().name, "the command line", folder)])]


def _changed(model: AdapterModel, args: argparse.Namespace) -> AdapterModel:
    given = {"model": args.model, "max_lora_rank": args.max_lora_rank}
    return model._replace(config=replace(model.config, **{k: v for k, v in given.items() if v is not None}))


def _check(model: AdapterModel) -> int:
    """Examine each; returns the bytes of one on each device."""
    spec, table = table_of(model.config)
    for adapter in model.adapters:
        examine(adapter, spec, table.whole)
    return table.bytes_per_adapter


def _num_places(model: AdapterModel) -> int:
    config = model.config
    if model.version is not None and config.enable_lora:
        config = with_places(config, model.version)
    return config.max_loras or DEFAULT_MAX_LORAS


def _as_json(model: AdapterModel, bytes_per_adapter: int | None) -> dict[str, object]:
    return {
        "version_folder": None if model.version is None else str(model.version),
        "enable_lora": model.config.enable_lora,
        "max_lora_rank": model.config.max_lora_rank,
        "max_loras": _num_places(model),
        "bytes_per_adapter": bytes_per_adapter,
        "adapters": [asdict(adapter) for adapter in model.adapters],
    }


def _report(model: AdapterModel, bytes_per_adapter: int | None) -> Iterator[str]:
    if model.version is not None:
        state = "" if model.config.enable_lora else " (enable_lora is not set in its model.json)"
        yield f"{model.version}: {len(model.adapters)} adapter{'s' * (len(model.adapters) != 1)}{state}"
    rows = [_row(adapter) for adapter in model.adapters]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(5)]
    for row, adapter in zip(rows, model.adapters, strict=True):
        cells = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        verdict = "" if bytes_per_adapter is None else "  refused" if adapter.refusals else "  served"
        yield f"  {cells}{verdict}".rstrip()
        yield from (f"    - {line}" for line in first_of(adapter.refusals, MOST_REFUSALS))
    if bytes_per_adapter is not None:
        places, num_ranks = _num_places(model), model.config.tensor_parallel_size
        whose = "the device's" if num_ranks == 1 else f"each of {num_ranks} devices'"
        yield (
            f"  {places} in one batch, of rank {model.config.max_lora_rank} at most: {show_bytes(bytes_per_adapter)}"
            f" each, {show_bytes(places * bytes_per_adapter)} of {whose} memory"
        )


def _row(adapter: AdapterFindings) -> tuple[str, ...]:
    size = "" if adapter.file_bytes is None else show_bytes(adapter.file_bytes)
    at = "" if adapter.mtime_ns is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(adapter.mtime_ns / 1e9))
    rank = "" if adapter.rank is None else f"rank {adapter.rank}"
    return adapter.name, adapter.folder, rank, size, at
