"""The dtype that a checkpoint's weights have, for configs that name none."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cb_backend.contracts.errors import ConfigError
from cb_backend.models.safetensors_files import StoredTensor, read_header
from cb_backend.models.weight_files import find_weight_files

DTYPE_KEYS = ("dtype", "torch_dtype")  # the first counts, where both are there
_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# A matrix of the model's own type: norms and routers are often kept in a wider one, and layers packed. Tied, the one
# matrix may be stored as the head.
_TELLING = ("embed_tokens.weight", "lm_head.weight")


def with_stored_dtype(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What is in `config.json`, with the dtype of the folder's weights where it names none.

    It is left out as well where there are no weights, or files that cannot be read: who loads them tells of those.
    """
    text = values.get("text_config")
    told = [values, text if isinstance(text, Mapping) else {}]
    if any(each.get(key) is not None for each in told for key in DTYPE_KEYS):
        return values
    dtype = _stored_dtype(folder)
    return values if dtype is None else {**values, DTYPE_KEYS[0]: dtype}


def _stored_dtype(folder: Path) -> str | None:
    """No header is read behind that of the embedding, which is mostly the first."""
    found: dict[str, StoredTensor] = {}
    try:
        for path in find_weight_files(folder):
            for stored in read_header(path):
                found |= {ending: stored for ending in _TELLING if stored.name.endswith(ending)}
            if _TELLING[0] in found:
                break
    except ConfigError:
        return None
    return next((_NAMES.get(found[ending].dtype) for ending in _TELLING if ending in found), None)
