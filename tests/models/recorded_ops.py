"""What a model asks of its ops in a step: each call's name and the shapes that go in and come out.

`python -m tests.models.recorded_ops` prints the calls of every case as JSON, which is how `recorded_ops.json` was made:
from the models as they were before a change that must not change them.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models import paged_model
from tests.models.paged_model import PagedModel
from tests.models.tiny_checkpoints import random_tokens, write_checkpoint

# name of the case: (checkpoint, options of `PagedModel`)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama-gqa", {}),
    "llama biases": ("llama-biases", {}),
    "llama fp8": ("llama-tied", {"quantization": "fp8"}),
    "llama fp8 biases": ("llama-biases", {"quantization": "fp8"}),
    "llama longrope": ("llama-longrope", {}),
    "mistral window": ("mistral-window", {}),
    "qwen2 mixed": ("qwen2-mixed", {}),
    "qwen3": ("qwen3", {}),
    "qwen3 mixed": ("qwen3-mixed", {"kv_dtype": torch.float8_e4m3fn}),
}
RECORDS = Path(__file__).parent / "recorded_ops.json"


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def _show(values: Any) -> str:
    kinds = {torch.float32: "", torch.int32: "i", torch.float8_e4m3fn: "e4m3"}
    return " ".join(kinds[each.dtype] + str(list(each.shape)) for each in _tensors(values))


def _recording(name: str, op: Callable[..., Any], calls: list[str]) -> Callable[..., Any]:
    def record(*args: Any, **kwargs: Any) -> Any:
        result = op(*args, **kwargs)
        calls.append(f"{name} {_show((args, kwargs))} -> {_show(result)}")
        return result

    return record


def record(case: str, folder: Path) -> list[str]:
    """The calls of a prompt's step, a mixed one, a decode step, and of the heads after them."""
    return calls_of(*CASES[case], folder)


def calls_of(checkpoint: str, options: dict[str, Any], folder: Path) -> list[str]:
    calls: list[str] = []
    resolve_ops = paged_model.resolve_ops

    def resolve_recording(backend: str) -> Any:
        ops = resolve_ops(backend)
        names = [field.name for field in dataclasses.fields(ops) if field.name != "backend"]
        return dataclasses.replace(ops, **{name: _recording(name, getattr(ops, name), calls) for name in names})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paged_model, "resolve_ops", resolve_recording)
        paged = PagedModel(write_checkpoint(checkpoint, folder), **options)
    prompt, other = random_tokens(20, seed=1), random_tokens(3, seed=2)
    paged.start(0, len(prompt))
    paged.start(1, len(other))
    paged.prefill(0, prompt)
    calls.append("next")
    paged.step([(0, 5)], [(1, other)])
    calls.append("next")
    paged.step([(0, 6), (1, 7)], [])
    return calls


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as root:
        json.dump({case: record(case, Path(root) / case) for case in CASES}, sys.stdout, indent=1)
        print()
