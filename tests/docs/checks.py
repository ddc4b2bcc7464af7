"""What is wrong with a page of Markdown: links, commands and paths that lead nowhere. Each check gives complaints."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from cb_backend.cli import main

ROOT = Path(__file__).resolve().parents[2]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^()\s]+)\)")
_ROOMS = "cb_backend|tests|kernels|docs|client|docker|model_repository"
_PATH = re.compile(rf"(?<![\w/.\-])(?:{_ROOMS})/[\w./*\-]*[\w*]")
_HASH = re.compile(r"\b(?=[0-9a-f]*[a-f])(?=[0-9a-f]*[0-9])[0-9a-f]{7,40}\b")


def pages() -> list[Path]:
    """Every Markdown file of the repository."""
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "kernels").glob("*.md")]
    return sorted(found)


def bad_links(page: Path, text: str) -> list[str]:
    """Relative links without a file, and anchors without a heading."""
    complaints = []
    for target in _LINK.findall(_FENCE.sub("", text)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists():
            complaints.append(f"{target}: there is no such file")
        elif anchor and anchor not in _anchors(text if file == page else file.read_text(encoding="utf-8")):
            complaints.append(f"{target}: there is no such heading")
    return complaints


def _anchors(text: str) -> set[str]:
    """Headings as GitHub names them."""
    headings = re.findall(r"^#+ (.*)$", _FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def bad_commands(text: str) -> list[str]:
    """`cb-backend` commands and options that the parser does not have, and `python -m` of no module."""
    return [complaint for command in _commands(text) for complaint in _complaints(command.split())]


def _commands(text: str) -> Iterator[str]:
    """The commands of code: lines of fences without what a comment says, and spans, which may go over a line's end."""
    for language, body in _FENCE.findall(text):
        if language != "diff":
            yield from (line.split("  #")[0] for line in body.replace("\\\n", " ").splitlines())
    for span in re.findall(r"`([^`]+)`", _FENCE.sub("", text)):
        yield " ".join(span.split())


def _complaints(words: list[str]) -> Iterator[str]:
    if words[:1] == ["cb-backend"]:
        yield from _cb_backend_complaints(words[1:])
    for before, word in pairwise(words):
        module = word.strip("`,.;:()")
        if before == "-m" and module.startswith("tests."):
            file = ROOT / module.replace(".", "/")
            if not file.with_suffix(".py").is_file():
                yield f"python -m {module}: there is no such module"


def _cb_backend_complaints(words: list[str]) -> Iterator[str]:
    if not words or words[0].startswith("-"):
        return
    name = words[0]
    if name not in main.COMMANDS:
        yield f"cb-backend {name}: there is no such command"
        return
    parser = _choices(main._parser(name))[name]
    for word in words[1:]:
        option = word.split("=")[0]
        choices = _choices(parser)
        if word in choices:
            parser = choices[word]
        elif option.startswith("--") and option not in parser._option_string_actions:
            yield f"cb-backend {name}: {option} is no option of {parser.prog}"


def _choices(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def bad_paths(text: str) -> list[str]:
    """Paths of this repository, in code or prose, without a file. `NAME` is any name; a page's diff makes its own."""
    prose = "".join(re.split(r"^```diff\n.*?^```", text, flags=re.MULTILINE | re.DOTALL))
    made = set(re.findall(r"^\+\+\+ b/(.*)$", text, re.MULTILINE))
    named = {path for path in _PATH.findall(prose) if "NAME" not in path} - made
    return sorted(f"{path}: there is no such file" for path in named if not any(ROOT.glob(path)))


def commit_hashes(text: str) -> list[str]:
    """Words that look like the hash of a commit."""
    return _HASH.findall(text)
