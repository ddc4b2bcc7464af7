"""`docs/guide/models.md`: which families and models are tested, and what memory they need, by the code of `check`.

python -m tests.docs.models        # writes it; the suite holds it equal
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING
from transformers.utils.quantization_config import QuantizationMethod

from cb_backend.cli.check_cards import CARDS, cache_room, card_faults
from cb_backend.contracts.config import EngineConfig
from cb_backend.contracts.errors import ConfigError
from cb_backend.kv_cache.layout import layout_of
from cb_backend.layers.weight_format import PackedFormat
from cb_backend.models.config_reader import ConfigReader
from cb_backend.models.gguf_blocks import BLOCK_KINDS
from cb_backend.models.packed_formats import GgufReader, Mxfp4BlocksReader
from cb_backend.models.quantization import METHODS, read_quantization
from cb_backend.models.registry import family_names, outline_spec, read_spec
from cb_backend.models.spec import ModelSpec
from tests.docs.tables import table
from tests.models.quantised_models import FORMATS

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "kernels"))

import published_models
from roofline import MODELS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guide" / "models.md"
CONTEXT = 8192  # tokens that a card's cache must hold beside the weights
FP8 = "fp8"
FP8_ROW = "fp8, a scale a tensor or an output"
INTRO = f"""# Models

<!-- Written by `python -m tests.docs.models` out of `kernels/published_models.py`; do not edit. -->

A checkpoint is served if its `model_type` is one of these families. Each is compared with transformers in float32, from
tiny checkpoints in the shapes that are published (`tests/models`):

{{families}}.

How weights may be stored, beside float32, float16 and bfloat16; each row is compared with the same numbers written out
(`tests/models/quantised_models.py`). Modules that a checkpoint leaves out stay as they are; a configuration that asks
for anything else is refused by name.

{{formats}}

Refused by name, of the methods that transformers knows: {{refused}}.

The models below are those that whole steps are timed with (`kernels/bench_step.py`). Memory is reckoned as `cb-backend
check` does it: weights as they lie on the device, in the checkpoint's own format and with `"quantization": "fp8"`; the
cache of one request of {CONTEXT:,} tokens in bfloat16 (half of it with `"kv_cache_dtype": "fp8"`, less where
layers with a window give back what has fallen out of it); and the smallest card of `check`'s that has room for
both, with the settings' defaults. Of any other checkpoint: `cb-backend check FOLDER`."""
FORMATS_HEAD = ("`quant_method`", "stored as", "bytes a weight on the device", "read in tests as")
HEAD = (
    "model",
    "parameters",
    "weights",
    "smallest card",
    f"cache of {CONTEXT:,} tokens",
    "weights in fp8",
    "card then",
)


def formats() -> str:
    """A line a way of storing, of those that the tests read."""
    rows = {("`fp8`, `compressed-tensors`, `modelopt`", FP8_ROW, "1.00"): ["fp8"]}
    for title, (config, _) in FORMATS.items():
        found = read_quantization(config)
        assert found is not None, title
        assert found.formats is not None, title
        default = found.formats.default
        assert isinstance(default, PackedFormat), title
        cells = f"`{config['quant_method']}`", default.name, f"{default.bytes_per_weight:.2f}"
        rows.setdefault(cells, []).append(title)
    for kind in BLOCK_KINDS:
        rows["`gguf`", f"GGUF {kind}", f"{PackedFormat(GgufReader(kind)).bytes_per_weight:.2f}"] = ["a .gguf file"]
    share = f"{PackedFormat(Mxfp4BlocksReader()).bytes_per_expert_weight:.2f}"
    rows["`mxfp4`", "mxfp4 of experts, as gpt-oss has them", share] = ["gpt-oss"]
    return table(FORMATS_HEAD, [[*cells, "; ".join(titles)] for cells, titles in rows.items()])


def refused() -> str:
    known = {str(method.value) for method in QuantizationMethod} | set(AUTO_QUANTIZATION_CONFIG_MAPPING)
    return ", ".join(f"`{name}`" for name in sorted(known - set(METHODS)))


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
            tokens = cache_room(config, spec, torch.bfloat16, layout_of(spec, 16, 2), card, num_bytes).num_tokens
        except ConfigError:
            continue
        if tokens >= CONTEXT:
            return _gb(num_bytes), card.name
    return _gb(num_bytes), "none alone"


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.2f} GB"


def page() -> str:
    families = ", ".join(f"`{name}`" for name in family_names())
    intro = INTRO.format(families=families, formats=formats(), refused=refused())
    return intro + "\n\n" + table(HEAD, [row(name) for name in names()]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
