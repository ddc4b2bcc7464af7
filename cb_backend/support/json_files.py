"""JSON files that people and tools write (`model.json`, a checkpoint's configs): a whole object, or one sentence.

It knows no keys.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from cb_backend.contracts.errors import ConfigError
from cb_backend.support.git_lfs import refuse_lfs_pointer
from cb_backend.support.native_paths import shown_path


def read_json_object(path: Path, *, refuses_twins: bool = False) -> dict[str, Any]:
    """The object in the file at `path`, which must exist. `refuses_twins`: an object may not have a key twice (JSON
    allows that, and the last one would count). A byte order mark, as editors on Windows write it, is passed over.
    Raises `ConfigError` that names the file and what is wrong with it.
    """

    def without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if refuses_twins and len(values) < len(pairs):
            twin = Counter(key for key, _ in pairs).most_common(1)[0][0]
            raise ConfigError(f"{path.name} sets {twin!r} more than once; keep one")
        return values

    try:
        refuse_lfs_pointer(path)
        values = json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=without_twins)
    except OSError as error:
        raise ConfigError(f"{path.name} cannot be read ({error.strerror}: {shown_path(path)})") from None
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise ConfigError(
            f"{path.name} is not text in UTF-8 (byte {byte:#04x} at {error.start}); save it in UTF-8"
        ) from None
    except RecursionError:
        raise ConfigError(f"{path.name} is not valid JSON: nested too deeply") from None
    except ValueError as error:
        raise ConfigError(f"{path.name} is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path.name} must hold a JSON object, found {type(values).__name__}")
    return values
