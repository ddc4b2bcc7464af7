"""The pages lead where they say: links, commands, options and files exist, and generated parts are as generated."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from cb_backend.cli.main import main
from tests.docs import checks, measured, settings
from tests.docs.checks import ROOT, pages

MOST_README_LINES = 200
PAGES = [str(page.relative_to(ROOT)) for page in pages()]
LAYOUT = {
    "guide": (
        "serving", "requests", "structured-output", "settings", "clients", "examples", "deploy", "kubernetes",
        "observability", "sizing",
    ),
    "behaviour": ("under-pressure", "when-things-break", "accuracy", "limits"),
    "design": ("overview", "scheduler", "kernels"),
    "contributing": ("setup", "tests", "add-a-model", "add-a-parameter", "add-a-kernel", "style"),
    ".": ("measured",),
}  # fmt: skip


@pytest.mark.parametrize("name", PAGES)
def test_links_commands_and_paths_exist(name: str) -> None:
    page = ROOT / name
    text = page.read_text(encoding="utf-8")
    assert checks.bad_links(page, text) + checks.bad_commands(text) + checks.bad_paths(text) == []


@pytest.mark.parametrize(("room", "name"), [(room, name) for room, names in LAYOUT.items() for name in names])
def test_every_page_is_there_and_can_be_reached(room: str, name: str) -> None:
    page = ROOT / "docs" / room / f"{name}.md"
    assert page.read_text(encoding="utf-8").startswith("# ")
    others = [ROOT / other for other in PAGES if ROOT / other != page]
    assert any(page in _targets(other) for other in others), "no page links to it"


def _targets(page: Path) -> set[Path]:
    found = re.findall(r"\]\(([^()\s#]+)", page.read_text(encoding="utf-8"))
    return {(page.parent / target).resolve() for target in found}


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= MOST_README_LINES


@pytest.mark.parametrize("name", [name for name in PAGES if name == "README.md" or name.startswith("docs/guide/")])
def test_what_users_read_names_no_commit(name: str) -> None:
    assert checks.commit_hashes((ROOT / name).read_text(encoding="utf-8")) == []


def test_the_page_of_the_scheduler_names_each_of_its_modules() -> None:
    text = (ROOT / "docs/design/scheduler.md").read_text(encoding="utf-8")
    named = re.findall(r"`(\w+\.py)`", "".join(line for line in text.splitlines() if line.startswith("| `")))
    modules = {path.name for path in (ROOT / "cb_backend/engine/scheduler").glob("*.py")} - {"__init__.py"}
    assert (sorted(named), len(named)) == (sorted(modules), len(modules))


@pytest.mark.parametrize("page", ["README.md", "docs/design/overview.md", "cb_backend/__init__.py"])
def test_every_room_of_the_package_is_named_where_the_house_is_shown(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    rooms = [path.parent.name for path in (ROOT / "cb_backend").glob("*/__init__.py")]
    assert len(rooms) > 10
    assert [room for room in rooms if not re.search(rf"\b{room}[`/]", text)] == []


def test_every_decision_has_its_parts_and_is_listed() -> None:
    overview = (ROOT / "docs/design/overview.md").read_text(encoding="utf-8")
    decisions = sorted((ROOT / "docs/design/decisions").glob("*.md"))
    assert [page.name[:4] for page in decisions] == [f"{number:04}" for number in range(1, len(decisions) + 1)]
    for page in decisions:
        text = page.read_text(encoding="utf-8")
        for part in ("**Context.**", "**Measured", "**Chosen.**", "**What would change it.**"):
            assert part in text, f"{page.name} lacks {part}"
        assert f"decisions/{page.name}" in overview


def test_measured_is_written_from_the_results() -> None:
    text = measured.PAGE.read_text(encoding="utf-8")
    assert text == measured.page(), "run `python -m tests.docs.measured`"
    readme = measured.README.read_text(encoding="utf-8")
    assert readme == measured.readme_with_table(readme), "run `python -m tests.docs.measured`"


def test_settings_are_written_from_the_code() -> None:
    assert settings.PAGE.read_text(encoding="utf-8") == settings.page(), "run `python -m tests.docs.settings`"


def test_the_picture_of_the_readme_is_a_picture() -> None:
    picture = (ROOT / "docs/batch.svg").read_text(encoding="utf-8")
    assert picture.startswith("<svg ")
    assert picture.count('class="stay"') == 2 * 18, "not the command that stands beside it in the README"


def test_a_timeline_is_a_plain_picture_where_its_name_says_so(tmp_path: Path) -> None:
    page, picture = tmp_path / "batch.html", tmp_path / "batch.svg"
    for out in (page, picture):
        assert main(["timeline", "demo", "--slots", "2", "--requests", "3", "--out", str(out)]) == 0
    root = ElementTree.parse(picture).getroot()
    pictures = root.findall("{http://www.w3.org/2000/svg}svg")
    tops = [float(one.get("y", "nan")) for one in pictures]
    heights = [float(one.get("height", "nan")) for one in pictures]
    assert tops == [0, heights[0]]
    assert float(root.get("height", "nan")) == sum(heights)
    assert page.read_text().startswith("<!doctype html>")
