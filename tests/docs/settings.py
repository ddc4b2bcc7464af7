"""`docs/guide/settings.md`, out of `cb_backend/contracts/config.py`: its fields, types, defaults and their comments.

python -m tests.docs.settings        # writes it; the suite holds it equal
"""

from __future__ import annotations

import ast
import dataclasses
import json
from pathlib import Path

from cb_backend.contracts import config
from cb_backend.contracts.config import EngineConfig
from cb_backend.contracts.config_values import kind_name
from tests.docs.tables import table

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "guide" / "settings.md"
INTRO = """# Settings

<!-- Written by `python -m tests.docs.settings` out of `cb_backend/contracts/config.py`; do not edit. -->

What `1/model.json` of a model may say, with vLLM's names. A key that is not here is refused by name. Values may be
text where vLLM's own files write them so (`"enforce_eager": "true"`). `null` is the default where that is `null`."""
WITHOUT_EFFECT = """## Accepted without effect

Arguments of vLLM that change nothing here at these values, and are refused at any other.

"""


def _comments(source: str) -> dict[str, tuple[str, str]]:
    """Section and text of each field, as the comments of the class tell them: behind it, or above it in full lines.

    A full line of a few words without a full stop, above a field, begins a section.
    """
    lines = source.splitlines()
    tree = ast.parse(source)
    body = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "EngineConfig").body
    found: dict[str, tuple[str, str]] = {}
    section = ""
    for node in body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        above: list[str] = []
        line = node.lineno - 2
        while lines[line].strip().startswith("#"):
            above.insert(0, lines[line].strip("# "))
            line -= 1
        if above and len(above[0].split()) <= 4 and not above[0].endswith("."):
            section = above.pop(0)
        behind = lines[node.lineno - 1].partition("  # ")[2]
        found[node.target.id] = section, " ".join([*above, behind]).strip()
    return found


def _shown(value: object) -> str:
    if value is dataclasses.MISSING:
        return "must be set"
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def _as_json(text: str) -> str:
    """A comment's Python values as a JSON file writes them, and safe inside a table."""
    for name, written in {"None:": "`null`:", "True:": "`true`:", "False:": "`false`:"}.items():
        text = text.replace(name, written)
    return text.replace("MAX_RUN_AHEAD", str(config.MAX_RUN_AHEAD)).replace("|", "\\|")


def page() -> str:
    """The whole of `docs/guide/settings.md`. Raises `ValueError` for a field that no comment tells of."""
    told = _comments(Path(config.__file__).read_text(encoding="utf-8"))
    sections: dict[str, list[list[str]]] = {}
    for field in dataclasses.fields(EngineConfig):
        section, text = told[field.name]
        if not text:
            raise ValueError(f"cb_backend/contracts/config.py says nothing of {field.name}; give it a comment")
        kind = kind_name(str(field.type)) + (" or null" if "None" in str(field.type) else "")
        sections.setdefault(section, []).append([f"`{field.name}`", kind, _shown(field.default), _as_json(text)])
    parts = [INTRO]
    for title, rows in sections.items():
        parts.append(f"## {title}\n\n" + table(["name", "type", "default", ""], rows))
    without = [
        [f"`{name}`", ", ".join(_shown(value) for value in values)]
        for name, values in config._ACCEPTED_WITHOUT_EFFECT.items()
    ]
    parts.append(WITHOUT_EFFECT + table(["name", "values"], without))
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"{PAGE.relative_to(ROOT)} written")
