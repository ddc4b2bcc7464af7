"""`docs/guide/models.md`: which families and models are tested, and what memory they need, by the code of `check`.

python -m tests.docs.models        # writes it; the suite holds it equal
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from cb_backend.cli.check_cards import CARDS, cache_tokens, card_faults
from cb_backend.contracts.config import EngineConfig
from cb_backend.contracts.errors import ConfigError
from cb_backend.kv_cache.layout import layout_of
from cb_backend.models.config_reader import ConfigReader
from cb_backend.models.registry import family_names, outline_spec, read_spec
from cb_backend.models.spec import ModelSpec
from tests.docs.tables import table

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "kernels"))

import published_models
from roofline import MODELS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guide" / "models.md"
CONTEXT = 8192  # tokens that a card's cache must hold beside the weights
FP8 = "fp8"
INTRO = f"""# Models

<!-- Written by `python -m tests.docs.models` out of `kernels/published_models.py`; do not edit. -->

A checkpoint is served if its `model_type` is one of these families. Each is compared with transformers in float32, from
tiny checkpoints in the shapes that are published (`tests/models`):

{{families}}.

The models below are those that whole steps are timed with (`kernels/bench_step.py`). Memory is reckoned as `cb-backend
check` does it: weights as they lie on the device, in the checkpoint's own format and with `"quantization": "fp8"`; the
cache of one request of {CONTEXT:,} tokens in bfloat16 (half of it with `"kv_cache_dtype": "fp8"`, less where
`"disable_hybrid_kv_cache_manager": false` gives windows back); and the smallest card of `check`'s that has room for
both, with the settings' defaults. Of any other checkpoint: `cb-backend check FOLDER`."""
HEAD = (
    "model",
    "parameters",
    "weights",
    "smallest card",
    f"cache of {CONTEXT:,} tokens",
    "weights in fp8",
    "card then",
)


def names() -> list[str]:
    """Smallest first."""
    return sorted([*MODELS, *published_models.OTHERS], key=num_parameters)


def num_parameters(name: str) -> int:
    """As bfloat16 would hold them, whatever the checkpoint's own format is."""
    values = {**published_models.config_values(name), "quantization_config": None}
    plain = outline_spec(read_spec(ConfigReader(values)), torch.bfloat16)
    return sum(placement.target.nbytes for placement in plain.placements()) // 2


def row(name: str) -> tuple[str, ...]:
    """Of one model."""
    spec = published_models.spec_of(name)
    cache = CONTEXT * layout_of(spec, 16, 2).bytes_per_token
    return (name, f"{num_parameters(name) / 1e9:.1f} B", *_placed(spec, None), _gb(cache), *_placed(spec, FP8))


def _placed(spec: ModelSpec, quantization: str | None) -> tuple[str, str]:
    """Weights, and the smallest card for them; empty where they are stored in a format of their own already."""
    if quantization is not None and spec.quantization is not None:
        return "", ""
    model = outline_spec(spec, torch.bfloat16, quantization)
    num_bytes = sum(placement.target.nbytes for placement in model.placements())
    config = EngineConfig(model="any", quantization=quantization, max_model_len=CONTEXT)
    for card in sorted(CARDS.values(), key=lambda card: (card.num_bytes, card.name)):
        if card_faults(card, config, quantization, torch.bfloat16):
            continue
        try:
            tokens = cache_tokens(config, spec, torch.bfloat16, layout_of(spec, 16, 2), card, num_bytes)
        except ConfigError:
            continue
        if tokens >= CONTEXT:
            return _gb(num_bytes), card.name
    return _gb(num_bytes), "none alone"


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.2f} GB"


def page() -> str:
    families = ", ".join(f"`{name}`" for name in family_names())
    return INTRO.format(families=families) + "\n\n" + table(HEAD, [row(name) for name in names()]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
