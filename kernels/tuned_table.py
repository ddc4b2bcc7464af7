"""The file of this GPU's launch parameters, `cb_backend/kernels/tuned/<gpu>.json`, as the tuners change it.

An entry is {"when": {condition: value}, "use": {parameter: value}}, and has "by": "steps" where whole steps chose it
(`tune_steps.py`, `tune_attention_steps.py`): what a kernel takes alone does not tell what it takes in a step, so the
tuners of kernels alone leave it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from cb_backend.kernels.launch import TUNED, gpu_slug, tuned_files

Entry = dict[str, Any]
Table = dict[str, list[Entry]]  # op -> its entries; the first that agrees with a launch serves it
BY_STEPS = {"by": "steps"}


def is_by_steps(entry: Entry) -> bool:
    return BY_STEPS.items() <= entry.items()


def own_path(device: torch.device) -> Path:
    return TUNED / f"{gpu_slug(device)}.json"


def read_table(device: torch.device) -> Table:
    """What the GPU uses now, without the defaults. Without a file of its own that is a relative's, which the first own
    one has to go on with: it will be looked into instead."""
    path = TUNED / tuned_files(device)[0]
    table: Table = json.loads(path.read_text()) if path.is_file() else {}
    return table


def write_table(table: Table, path: Path) -> None:
    """One line an entry; ops without any are left out."""
    ops = (
        f'  "{op}": [\n' + ",\n".join(f"    {json.dumps(entry)}" for entry in entries) + "\n  ]"
        for op, entries in sorted(table.items())
        if entries
    )
    path.write_text("{\n" + ",\n".join(ops) + "\n}\n")


def put(entries: list[Entry], found: list[Entry]) -> list[Entry]:
    """`found` in the places of entries with the same conditions, or else before all others; but behind those with more
    conditions than it has, which would never be found behind it."""
    entries = list(entries)
    for new in reversed(found):
        places = [place for place, entry in enumerate(entries) if entry.get("when") == new["when"]]
        if places:
            entries[places[0]] = new
        else:
            closer = [place for place, each in enumerate(entries) if each.get("when", {}).items() > new["when"].items()]
            entries.insert(max(closer, default=-1) + 1, new)
    return entries


def replace(
    entries: list[Entry], found: list[Entry], is_tuned: Callable[[Entry], bool], *, keeps_steps: bool
) -> list[Entry]:
    """`found` instead of the entries that were tuned (one that is not found again had no gain), after all others.

    `keeps_steps`: not instead of entries that were chosen in whole steps.
    """
    kept = [entry for entry in entries if not is_tuned(entry) or (keeps_steps and is_by_steps(entry))]
    conditions = [entry["when"] for entry in kept]
    return [*kept, *(entry for entry in found if entry["when"] not in conditions)]
