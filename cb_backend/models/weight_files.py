"""Which of a checkpoint's files hold its weights: the choice that transformers makes, and what else people publish.

Knows file names alone; what is in the files is for `weights`. Pickled files are never read.
"""

from __future__ import annotations

import re
from pathlib import Path

from cb_backend.contracts.errors import ConfigError
from cb_backend.support.json_files import read_json_object

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Beside the weights in their own layout: the same weights as the model's first makers store them, and adapters.
_OTHER_LAYOUTS = ("consolidated", "adapter_")
_SHARD = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")


def find_weight_files(folder: Path) -> list[Path]:
    """`model.safetensors`; without it the shards that the index names; without that every safetensors file there is.

    Raises `ConfigError` for a file that is missing, a broken index, and a folder without safetensors.
    """
    if (folder / SINGLE).is_file():  # first, as in transformers: an index beside it is older
        return [folder / SINGLE]
    if (folder / INDEX).is_file():
        return [folder / name for name in _indexed_names(folder)]
    files = sorted(folder.glob("*.safetensors"))
    files = [file for file in files if not file.name.startswith(_OTHER_LAYOUTS)] or files
    if not files:
        raise ConfigError(_why_none(folder))
    _check_complete(files)
    return files


def _indexed_names(folder: Path) -> list[str]:
    weight_map = read_json_object(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ConfigError(
            f"{INDEX} is broken: it has no weight_map of tensor names and file names; fetch the checkpoint again"
        )
    names = sorted(set(weight_map.values()))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing or not names:
        what = f"names {missing[0]}, which is missing" if missing else "names no file"
        raise ConfigError(f"{INDEX} {what}; fetch the checkpoint again")
    return names


def _check_complete(files: list[Path]) -> None:
    """Raises `ConfigError` where shards that count themselves (00001-of-00003) are not all there."""
    names = {file.name for file in files}
    for name in sorted(names):
        if shard := _SHARD.fullmatch(name):
            count = int(shard["count"])
            wanted = (f"{shard['stem']}-{number:05d}-of-{shard['count']}.safetensors" for number in range(1, count + 1))
            if missing := next((other for other in wanted if other not in names), None):
                raise ConfigError(f"{name} is there, but {missing} is missing; fetch the checkpoint again")


def _why_none(folder: Path) -> str:
    pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if pickled:
        return (
            f"the checkpoint holds {pickled[0]}, which is pickled and may run code; convert it to safetensors: "
            "load it with transformers and save_pretrained(folder)"
        )
    return "the checkpoint's folder holds no .safetensors file"
