"""Which chat templates a checkpoint's folder holds, and under which names.

Templates come as `chat_template.jinja`, as `additional_chat_templates/NAME.jinja`, or in `tokenizer_config.json`: one
text, a list of named ones, or an object of them. What they say is not looked at here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cb_backend.contracts.errors import ConfigError

DEFAULT = "default"
TOOL_USE = "tool_use"


def read_chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Name -> source text of every template; empty where there is none.

    Files go before what `config` (of `tokenizer_config.json`) holds; of that, only a default is taken beside files
    that have none. Raises `ConfigError` for a file that cannot be read.
    """
    files = {DEFAULT: folder / "chat_template.jinja"}
    files |= {path.name.removesuffix(".jinja"): path for path in folder.glob("additional_chat_templates/*.jinja")}
    templates = {name: _read(path) for name, path in sorted(files.items()) if path.is_file()}
    if DEFAULT in templates:
        return templates
    configured = _configured(config.get("chat_template"))
    if not templates:
        return configured
    return templates | {name: source for name, source in configured.items() if name == DEFAULT}


def _configured(value: Any) -> dict[str, str]:
    if isinstance(value, list):
        value = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
    if isinstance(value, str):
        value = {DEFAULT: value}
    named = value.items() if isinstance(value, dict) else ()
    return {name: source for name, source in named if isinstance(name, str) and isinstance(source, str)}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path.name} cannot be read as UTF-8 text: {error}") from None
