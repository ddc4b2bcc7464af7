"""kernels/tuned_table.py: what the tuners leave of a GPU's file, and what a new one begins with. No GPU."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cb_backend.cli.paths import checkout_path
from cb_backend.kernels import launch

H200 = torch.device("cuda", 0)


@pytest.fixture
def workshop(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The scripts of `kernels/`, which import each other by name."""
    monkeypatch.syspath_prepend(str(checkout_path("kernels")))
    import tune_linear
    import tuned_table

    return SimpleNamespace(tune_linear=tune_linear, tuned_table=tuned_table)


def entry(n: int, m: int, block_n: int, **by: str) -> dict[str, Any]:
    return {"when": {"n": n, "k": 2048, "m": m}, "use": {"block_n": block_n}, **by}


def test_entries_take_the_places_of_their_conditions_and_new_ones_go_first(workshop: SimpleNamespace) -> None:
    entries = [entry(64, 1, 8), entry(64, 2, 8), {"when": {}, "use": {"block_n": 1}}]
    found = [entry(32, 1, 16), entry(64, 2, 16, by="steps"), entry(32, 2, 16)]
    put = workshop.tuned_table.put(entries, found)
    assert put == [found[0], found[2], entry(64, 1, 8), found[1], {"when": {}, "use": {"block_n": 1}}]
    assert entries[1] == entry(64, 2, 8)


@pytest.mark.parametrize("keeps_steps", [True, False])
def test_products_tuned_alone_leave_what_steps_chose(workshop: SimpleNamespace, keeps_steps: bool) -> None:
    """Of Llama-3.2-1B's output product, rows of 1 to 16 are tuned; only those of 2 are found to gain."""
    arguments = SimpleNamespace(models="llama-3.2-1b", rows="1,8")
    of_steps = entry(2048, 1, 8, by="steps"), entry(2048, 2, 8, by="steps")
    others = entry(2048, 32, 8, by="steps"), entry(999, 1, 8)  # more rows, another model
    entries = [of_steps[0], others[0], entry(2048, 4, 8), of_steps[1], others[1], entry(2048, 8, 8)]
    found = [entry(2048, 2, 16), entry(2048, 4, 16)]
    left = workshop.tuned_table.replace(
        entries, found, lambda each: workshop.tune_linear.is_of(each, arguments), keeps_steps=keeps_steps
    )
    if keeps_steps:
        assert left == [of_steps[0], others[0], of_steps[1], others[1], found[1]]
    else:
        assert left == [*others, *found]


def test_a_file_of_its_own_begins_as_the_relatives(
    workshop: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the new entries alone it would hide all others: it is looked into instead of the relative's."""
    table = workshop.tuned_table
    for module in (launch, table):
        monkeypatch.setattr(module, "TUNED", tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert table.read_table(H200) == {}
    relatives = {"linear": [entry(64, 1, 8)], "sample": [entry(64, 2, 8)]}
    (tmp_path / launch._RELATIVES[9, 0]).write_text(json.dumps(relatives))
    found = table.read_table(H200)
    assert found == relatives
    found["linear"] = table.put(found["linear"], [entry(64, 1, 16)])
    found["sample"] = []
    table.write_table(found, table.own_path(H200))
    assert (tmp_path / "nvidia-h200.json").read_text().count("\n") == 5  # a line an entry, none for an op without
    assert table.read_table(H200) == {"linear": [entry(64, 1, 16)]}
    assert json.loads((tmp_path / launch._RELATIVES[9, 0]).read_text()) == relatives
