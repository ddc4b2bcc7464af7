"""Mistral: Llama without biases, and with one attention window for all layers unless it is switched off.

Where `layer_types` tells which layers slide it is Ministral under Mistral's name.
"""

from __future__ import annotations

from cb_backend.models.families.ministral import read_spec

__all__ = ["read_spec"]
