"""What the configurations of tiny checkpoints have in common: sizes, ropes of every type, kinds of layers."""

from __future__ import annotations

from typing import Any

ORIGINAL_LEN = 16  # pretraining context of the scaled ropes; max_position_embeddings is 8 times that

BASE = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8 * ORIGINAL_LEN,
    "initializer_range": 0.25,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def rope(rope_type: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10_000.0, **values}}


LONGROPE = {
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 2.0, 3.0, 5.0, 8.0, 13.0],
    "original_max_position_embeddings": ORIGINAL_LEN,
}
# Wavelengths below 8 are kept, above 32 stretched; head_dim 12 has some below, between and above.
LLAMA3 = {"low_freq_factor": 0.5, "high_freq_factor": 2.0, "original_max_position_embeddings": ORIGINAL_LEN}

ROPES: dict[str, dict[str, Any]] = {
    "linear": {**rope("linear", factor=8.0)},
    # dynamic stretches beyond max_position_embeddings itself
    "dynamic": {**rope("dynamic", factor=4.0), "max_position_embeddings": ORIGINAL_LEN},
    "llama3": rope("llama3", factor=8.0, **LLAMA3),
    "yarn": rope("yarn", factor=8.0, original_max_position_embeddings=ORIGINAL_LEN),
    "longrope": rope("longrope", factor=8.0, **LONGROPE),
}

FULL, SLIDING = "full_attention", "sliding_attention"
