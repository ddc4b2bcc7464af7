"""What `cb_backend` offers as a library, and that naming the package costs nothing."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import cb_backend

HEAVY = ("torch", "triton", "transformers", "tokenizers", "numpy", "msgspec", "zmq", "rich", "jinja2")


def modules_after(code: str) -> set[str]:
    """Top-level names of the modules that a fresh interpreter has loaded after `code`."""
    script = f"{code}\nimport json, sys\nprint(json.dumps(sorted({{name.split('.')[0] for name in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    return set(json.loads(done.stdout))


def test_the_public_names_are_these() -> None:
    assert cb_backend.__all__ == ["LLM", "EngineConfig", "SamplingParams", "__version__"]
    assert all(getattr(cb_backend, name) is not None for name in cb_backend.__all__)
    assert set(cb_backend.__all__) <= set(dir(cb_backend))


def test_importing_the_package_costs_nothing() -> None:
    assert modules_after("import cb_backend; cb_backend.__version__").isdisjoint(HEAVY)


def test_parameters_and_configuration_need_no_torch() -> None:
    loaded = modules_after("from cb_backend import EngineConfig, SamplingParams; SamplingParams(n=2)")
    assert loaded.isdisjoint({"torch", "triton", "transformers", "tokenizers"})


def test_other_names_are_missing_as_of_any_module() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Llm'"):
        cb_backend.Llm  # noqa: B018
