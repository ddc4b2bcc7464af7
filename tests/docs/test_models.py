"""The page of models is what its script writes, and its sizes are those that are known from elsewhere."""

from __future__ import annotations

import pytest

from cb_backend.models.quantization import METHODS
from cb_backend.models.registry import family_names
from tests.docs import models


def test_h16_the_page_of_models_is_up_to_date() -> None:
    assert models.PAGE.read_text(encoding="utf-8") == models.page(), "run `python -m tests.docs.models`"


@pytest.mark.parametrize(("name", "parameters"), [
    ("llama-3.1-8b", 8.03e9), ("qwen3-30b-a3b", 30.5e9), ("gpt-oss-20b", 20.9e9), ("phi-4", 14.7e9),
])  # fmt: skip
def test_h16_parameters_are_those_that_are_published(name: str, parameters: float) -> None:
    assert models.num_parameters(name) == pytest.approx(parameters, rel=0.01)


def test_every_family_is_named() -> None:
    page = models.PAGE.read_text(encoding="utf-8")
    assert all(f"`{name}`" in page for name in family_names())


def test_every_method_is_served_or_refused_there() -> None:
    page = models.PAGE.read_text(encoding="utf-8")
    assert all(f"`{name}`" in page for name in METHODS)
    assert all(f"`{name}`" in models.refused() for name in ("bitsandbytes", "auto-round", "hqq", "torchao"))
    assert not any(f"`{name}`" in models.refused() for name in METHODS)
