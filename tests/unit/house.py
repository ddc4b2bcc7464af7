"""The counts of the house: how large it is, how its rooms hang together, how many files a new feature touches.

`python -m tests.unit.house [FOLDER]` prints them, of this checkout and of another one: before and after a change of
structure.

A *room* is a package, at most two levels deep; a file that lies loose beside packages is a room of its own. An *arrow*
goes from a room to another one that it imports. A room's *floor* is the longest way down from it, from 1. A *circle* is
a set of rooms each of which can be reached from the others.
"""

from __future__ import annotations

import io
import re
import sys
import tokenize
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import grimp

PACKAGE = "cb_backend"
ROOT = Path(__file__).parents[2]
RUNS_NEXT = f"{PACKAGE}/engine/scheduler"
PAGES = ROOT / "docs" / "contributing"

Arrows = dict[str, set[str]]  # room -> rooms that it imports


class Size(NamedTuple):
    files: int
    lines: int


class Reach(NamedTuple):
    """How many files of the package a feature of one kind takes: those that name one that is there."""

    kind: str
    names: str  # regular expression of whole identifiers and strings
    example: str


REACHES = (
    Reach("a row-wise sampling parameter", r"min_p", "min_p"),
    Reach("a side result", r"PromptLogprobs|prompt_logprobs|ChunkLogprobs", "the prompt's log-probabilities"),
    Reach("a weight format", r"GptqReader|_read_gptq|read_gptq|gptq\w*", "GPTQ"),
)


class Toy(NamedTuple):
    """A small feature of one kind: the diff of a page, which the suite applies to a copy of the tree and tries."""

    kind: str
    page: str


TOYS = (
    Toy("a toy model family", "add-a-model"),
    Toy("a toy row-wise sampling parameter", "add-a-parameter"),
    Toy("a toy side result", "add-a-side-result"),
    Toy("a toy weight format", "add-a-weight-format"),
    Toy("a toy kernel", "add-a-kernel"),
    Toy("a toy metric", "add-a-metric"),
)


def size_of(folder: Path) -> Size:
    """Python files below a folder, and their lines."""
    files = sorted(folder.rglob("*.py"))
    return Size(len(files), sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files))


# ---- rooms --------------------------------------------------------------------------------------------------------


def room_of(module: str, packages: set[str]) -> str:
    """The room that a module of the package lies in. packages: names of all packages."""
    parts = module.split(".")
    folder = module if module in packages else ".".join(parts[:-1])
    room = ".".join(folder.split(".")[:3])
    has_packages_beside = any(name.startswith(room + ".") for name in packages)
    return module if room == PACKAGE or (has_packages_beside and room == folder) else room


def arrows_of(root: str = PACKAGE, folder: Path = ROOT) -> Arrows:
    """Of all rooms; without what is imported for type checking only. folder: where the package lies; none of it may
    have been imported from elsewhere."""
    sys.path.insert(0, str(folder))
    try:
        graph = grimp.build_graph(root, exclude_type_checking_imports=True, cache_dir=None)
    finally:
        sys.path.remove(str(folder))
    packages = {name for name in graph.modules if graph.find_children(name)}
    arrows: Arrows = {}
    for module in sorted(graph.modules - packages):
        room = room_of(module, packages)
        below = arrows.setdefault(room, set())
        below |= {room_of(name, packages) for name in graph.find_modules_directly_imported_by(module)} - {room, root}
    return arrows


def circle_of(arrows: Arrows) -> list[str]:
    """The rooms of one circle, in its order; empty if there is none."""
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def floors_of(arrows: Arrows) -> dict[str, int]:
    """The floor of each room, where there is no circle."""
    floors: dict[str, int] = {}
    for room in TopologicalSorter(arrows).static_order():
        floors[room] = 1 + max((floors[below] for below in arrows.get(room, ())), default=0)
    return floors


def storeys_of(arrows: Arrows) -> Arrows:
    """The same house seen from further off: rooms of the first level only."""
    seen: Arrows = {}
    for room, below in arrows.items():
        storey = _first_level(room)
        seen.setdefault(storey, set()).update({_first_level(name) for name in below} - {storey})
    return seen


def _first_level(room: str) -> str:
    return ".".join(room.split(".")[:2])


def _counts(arrows: Arrows) -> str:
    circle = circle_of(arrows)
    floors = "no floors" if circle else f"{max(floors_of(arrows).values())} floors"
    num_arrows = sum(map(len, arrows.values()))
    return f"{len(arrows)} rooms, {floors}, {num_arrows} arrows, circle: {' -> '.join(circle) or 'none'}"


# ---- reaches ------------------------------------------------------------------------------------------------------


def words_of(source: str) -> Iterator[str]:
    """Identifiers of a source text, and those in strings that are nothing else; no comments, no documentation."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME:
            yield token.string
        elif token.type == tokenize.STRING and (match := re.fullmatch(r"""["'](\w+)["']""", token.string)):
            yield match[1]


def files_that_name(names: str, folder: Path) -> list[str]:
    """Files below `folder` in which an identifier, or a string that is one word, matches `names`."""
    is_named = re.compile(names).fullmatch
    return [
        str(file.relative_to(folder))
        for file in sorted(folder.rglob("*.py"))
        if any(is_named(word) for word in words_of(file.read_text(encoding="utf-8")))
    ]


def files_of_toy(page: str) -> list[str]:
    """Files that the diff of a page of docs/contributing touches."""
    text = (PAGES / f"{page}.md").read_text(encoding="utf-8")
    return re.findall(r"^\+\+\+ b/(.*)$", text, re.MULTILINE)


# ---- what is printed ----------------------------------------------------------------------------------------------


def structure(folder: Path) -> list[str]:
    """How large the checkout is, and how its rooms hang together."""
    package, scheduler = size_of(folder / PACKAGE), size_of(folder / RUNS_NEXT)
    arrows = arrows_of(folder=folder)
    return [
        f"package: {package.lines} lines in {package.files} files",
        f"what runs next ({RUNS_NEXT}): {scheduler.lines} lines in {scheduler.files} files",
        f"two levels deep: {_counts(arrows)}",
        f"one level deep: {_counts(storeys_of(arrows))}",
    ]


def reaches() -> list[str]:
    """How many files of this checkout features take."""
    lines = []
    for toy in TOYS:
        touched = files_of_toy(toy.page)
        own = [file.removeprefix(f"{PACKAGE}/") for file in touched if file.startswith(f"{PACKAGE}/")]
        lines.append(f"{toy.kind}: {len(own)} of the package, {len(touched) - len(own)} of the tests: {', '.join(own)}")
    for reach in REACHES:
        files = files_that_name(reach.names, ROOT / PACKAGE)
        lines.append(f"{reach.kind}: {len(files)} files name {reach.example}: {', '.join(files)}")
    return lines


def main(folders: list[str]) -> int:
    for folder in map(Path, folders):
        if not (folder / PACKAGE).is_dir():
            print(f"{folder} is no checkout: it has no folder {PACKAGE}", file=sys.stderr)
            return 2
    for folder in map(Path, folders):
        print(f"{folder}:", *structure(folder.resolve()), f"{ROOT}:", sep="\n")
    print(*structure(ROOT), *reaches(), sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
