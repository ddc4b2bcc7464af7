"""The counts of the house are right on small houses, and the house itself has no circle."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from cb_backend.cli.main import COMMANDS
from tests.unit import house
from tests.unit.house import arrows_of, circle_of, files_that_name, floors_of, room_of, size_of, storeys_of

PACKAGES = {"cb_backend", "cb_backend.engine", "cb_backend.engine.runner", "cb_backend.layers"}


def test_the_house_has_no_circle() -> None:
    arrows = arrows_of()
    assert circle_of(arrows) == circle_of(storeys_of(arrows)) == []
    assert "cb_backend.engine.scheduler" in arrows
    assert "cb_backend.contracts" in arrows["cb_backend.engine.scheduler"]
    floors = floors_of(arrows)
    assert all(floors[room] > floors[below] for room, all_below in arrows.items() for below in all_below)


def test_no_room_of_the_commands_may_import_any_command() -> None:
    """Of what `make lint` forbids: a command that its list lacks would pass."""
    text = (house.ROOT / "pyproject.toml").read_text(encoding="utf-8")
    contract = text.partition("the commands' rooms know no command")[2].partition("[[tool")[0]
    forbidden = re.findall(r'"cb_backend\.cli\.(\w+)"', contract.partition("forbidden_modules")[2])
    assert sorted(forbidden) == sorted([*COMMANDS, "main"])


def test_a_circle_is_found() -> None:
    assert set(circle_of({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}})) == {"a", "b", "c"}


def test_floors_are_longest_ways_down() -> None:
    assert floors_of({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == {"c": 1, "b": 2, "a": 3}


def test_rooms_are_packages_and_loose_files() -> None:
    rooms = {
        "cb_backend.loose": "cb_backend.loose",
        "cb_backend.layers.norm": "cb_backend.layers",
        "cb_backend.engine.llm_engine": "cb_backend.engine.llm_engine",
        "cb_backend.engine.runner.bad_words": "cb_backend.engine.runner",
    }
    assert {module: room_of(module, PACKAGES) for module in rooms} == rooms


def test_names_are_counted_in_code_alone(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("min_p = 1\n")
    (tmp_path / "key.py").write_text('x = {"min_p": 1}\n')
    (tmp_path / "prose.py").write_text('"""Of min_p."""  # min_p\nmin_pixels = 1\n')
    assert files_that_name("min_p", tmp_path) == ["code.py", "key.py"]
    assert size_of(tmp_path) == (3, 4)


def test_it_prints_every_count() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.house"], capture_output=True, text=True, timeout=120, cwd=house.ROOT
    )
    assert done.returncode == 0, done.stderr
    begins = [line.partition(":")[0] for line in done.stdout.splitlines()]
    kinds = [each.kind for each in (*house.TOYS, *house.REACHES)]
    counts = ["two levels deep", "one level deep"]
    assert begins == ["package", f"what runs next ({house.RUNS_NEXT})", *counts, *kinds]
    assert not [line for line in done.stdout.splitlines() if ": 0 " in line]


def test_it_counts_another_checkout_beside_this_one(tmp_path: Path) -> None:
    sources = {
        "__init__.py": "", "loose.py": "import cb_backend.engine.work\n", "contracts/__init__.py": "",
        "contracts/work.py": "", "engine/__init__.py": "", "engine/work.py": "from cb_backend.contracts import work\n",
    }  # fmt: skip
    for name, source in sources.items():
        file = tmp_path / house.PACKAGE / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(source)
    command = [sys.executable, "-m", "tests.unit.house", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=house.ROOT)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:2] == [f"{tmp_path}:", "package: 2 lines in 6 files"]
    assert lines[4:6] == ["one level deep: 3 rooms, 3 floors, 2 arrows, circle: none", f"{house.ROOT}:"]
    assert lines[6] != lines[1], "this checkout's own"


def test_a_folder_that_is_no_checkout_is_refused_by_name(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.unit.house", str(tmp_path / "away")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=house.ROOT)
    assert done.returncode == 2
    assert done.stderr == f"{tmp_path / 'away'} is no checkout: it has no folder cb_backend\n"
