"""The tuners of kernels/: what they leave of a GPU's file, what a new one begins with, which products have entries."""

from __future__ import annotations

import importlib
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
    import linear_shapes
    import tune
    import tune_linear
    import tune_steps
    import tuned_table

    return SimpleNamespace(
        linear_shapes=linear_shapes,
        tune=tune,
        tune_linear=tune_linear,
        tune_steps=tune_steps,
        tuned_table=tuned_table,
    )


def on_an_h200(tuned_table: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the files of `folder`."""
    for module in (launch, tuned_table):
        monkeypatch.setattr(module, "TUNED", folder)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


def entry(n: int, m: int, block_n: int, **by: str) -> dict[str, Any]:
    return {"when": {"n": n, "k": 2048, "m": m}, "use": {"block_n": block_n}, **by}


def test_entries_take_the_places_of_their_conditions_and_new_ones_go_first(workshop: SimpleNamespace) -> None:
    entries = [entry(64, 1, 8), entry(64, 2, 8), {"when": {}, "use": {"block_n": 1}}]
    found = [entry(32, 1, 16), entry(64, 2, 16, by="steps"), entry(32, 2, 16)]
    put = workshop.tuned_table.put(entries, found)
    assert put == [found[0], found[2], entry(64, 1, 8), found[1], {"when": {}, "use": {"block_n": 1}}]
    assert entries[1] == entry(64, 2, 8)


def test_a_new_entry_does_not_hide_those_of_some_rows(workshop: SimpleNamespace) -> None:
    """Which go before it, and only those."""
    of_rows = {"when": {"k": 2048, "m": 16, "rows": 64}, "use": {"block_k": 1}}
    other = {"when": {"k": 4096, "m": 16}, "use": {"block_k": 2}}
    new = {"when": {"k": 2048, "m": 16}, "use": {"block_k": 3}}
    assert workshop.tuned_table.put([of_rows, other], [new]) == [of_rows, new, other]
    assert workshop.tuned_table.put([other, of_rows], [new, other]) == [other, of_rows, new]


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
    on_an_h200(table, tmp_path, monkeypatch)
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


def test_steps_give_all_rows_of_a_group_the_same_entry(workshop: SimpleNamespace) -> None:
    """So that a row's result is the same in any batch of 2 to 16."""
    shape = workshop.linear_shapes.Shape("linear", 3072, 2048, "qkv")
    table = workshop.tune_steps.entries({shape: {"block_n": 64}}, 3)
    assert [each["when"] for each in table["linear"]] == [{"n": 3072, "k": 2048, "m": m} for m in (2, 4, 8, 16)]
    assert all(each["use"] == {"block_n": 64} and each["by"] == "steps" for each in table["linear"])
    served_with = workshop.linear_shapes.served_with
    assert (served_with(1), served_with(17), served_with(48), served_with(256)) == ([1], [32], [64], [256])
    with pytest.raises(ValueError, match="9000 rows"):
        served_with(9000)


@pytest.mark.parametrize("path", sorted(launch.TUNED.glob("*.json")), ids=lambda path: path.stem)
def test_a_search_in_steps_can_find_what_it_has_found_for_one_row(workshop: SimpleNamespace, path: Path) -> None:
    table = json.loads(path.read_text())
    for op in ("linear", "linear_silu_mul"):
        for each in table.get(op, []):
            if each.get("by") == "steps" and each["when"]["m"] == 1:
                has_norm = "norm" in each["use"]
                shape = workshop.linear_shapes.Shape(op, each["when"]["n"], each["when"]["k"], "", has_norm)
                tiles = workshop.tune_steps.tried(shape, 1, 132, False)
                assert {name: value for name, value in each["use"].items() if name != "prefetch"} in tiles
                assert each["use"].get("prefetch", 0) in workshop.tune_steps.PREFETCHES
                assert all(tile["block_k"] <= shape.k for tile in tiles if "vector" in tile)


def test_steps_are_saved_as_they_are_found_and_dry_runs_not(
    workshop: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_an_h200(workshop.tuned_table, tmp_path, monkeypatch)
    (tmp_path / launch._RELATIVES[9, 0]).write_text(json.dumps({"linear": [entry(64, 1, 8), entry(64, 2, 8)]}))
    own = tmp_path / "nvidia-h200.json"

    def run(arguments: Any, save: Any) -> None:
        save({"linear": [entry(64, 2, 16, by="steps")]})
        assert own.is_file() != arguments.dry_run
        save({"linear_silu_mul": [entry(32, 1, 16, by="steps")]})

    assert workshop.tune.tune_in_steps(run, SimpleNamespace(dry_run=True)) == 0
    assert not own.exists()
    assert workshop.tune.tune_in_steps(run, SimpleNamespace(dry_run=False)) == 0
    assert json.loads(own.read_text()) == {
        "linear": [entry(64, 1, 8), entry(64, 2, 16, by="steps")],
        "linear_silu_mul": [entry(32, 1, 16, by="steps")],
    }


def test_every_tuner_of_whole_steps_that_can_be_named_is_there(workshop: SimpleNamespace) -> None:
    for module in workshop.tune.IN_STEPS.values():
        assert callable(importlib.import_module(module).run), module
