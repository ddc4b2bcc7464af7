"""The parameters of rotary position embeddings, as plain data; `rotary` turns them into angles."""

from __future__ import annotations

from dataclasses import dataclass

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """How positions turn into angles. Fields that a rope_type does not use keep their defaults."""

    rope_type: str  # one of ROPE_TYPES
    theta: float  # base of the frequencies
    max_position_embeddings: int
    factor: float = 1.0
    original_max_position_embeddings: int = 0  # llama3, yarn, longrope: length of the pretraining context
    attention_factor: float | None = None  # yarn, longrope: scales cos and sin; None: computed
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    mscale: float = 0.0  # yarn; 0 = not given
    mscale_all_dim: float = 0.0  # yarn; 0 = not given
    truncate: bool = True  # yarn: round the ramp's borders to whole dimensions
    query_scale_beta: float = 0.0  # queries at position p are scaled by 1 + beta ln(1 + p // original length); 0: not
    short_factor: tuple[float, ...] = ()  # longrope [head_dim / 2]
    long_factor: tuple[float, ...] = ()  # longrope [head_dim / 2]
