"""Every shape in which checkpoints are published, loaded and compared with transformers, as a table.

    python -m tests.models.published_shapes [--only TEXT]

Logits in float32 of a prompt and further tokens; fp8 checkpoints against projections that round. Refused shapes must
be refused with their reason. The exit code is 1 where a shape comes out otherwise.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from cb_backend.contracts.errors import ConfigError
from cb_backend.models.checkpoint import resolve_checkpoint
from tests.models import test_fp8_weights
from tests.models.paged_model import PagedModel
from tests.models.published_checkpoints import published_checkpoints
from tests.models.published_shape import PublishedShape
from tests.models.tiny_checkpoints import random_tokens, reference_logits

NUM_PROMPT, NUM_DECODE = 40, 3
TOLERANCE = 1e-4
FP8_TOLERANCE = 0.05  # of the largest logit: a rounding error before fp8 is a step of fp8 after it

Check = Callable[[Path], str | None]  # in an empty folder: what is wrong, or None


def all_checks() -> Iterator[tuple[str, str, Check]]:
    """(name, outcome, check) of every shape: of checkpoints, GGUF files, and tokenizers with their templates."""
    for shape in published_checkpoints():
        yield shape.name, shape.outcome, partial(difference, shape)
    if gguf := _optional("tests.models.published_gguf"):
        for shape in gguf.published_gguf():
            yield shape.name, shape.outcome, partial(difference, shape)
    if tokenizers := _optional("tests.front_end.published_tokenizers"):
        for name, build, check in tokenizers.published_tokenizers():
            yield f"tokenizer: {name}", "equal", partial(_failure, build, check)


def difference(shape: PublishedShape, folder: Path) -> str | None:
    """What comes out otherwise than the shape says, or None."""
    built, reference = folder / "built", folder / "reference"
    built.mkdir()
    reference.mkdir()
    path = shape.build(built)
    try:
        checkpoint = resolve_checkpoint(str(path))
        paged = PagedModel(checkpoint)
    except ConfigError as error:
        if shape.outcome == "equal":
            return f"refused: {error}"
        return None if shape.outcome in str(error) else f"refused for another reason: {error}"
    if shape.outcome != "equal":
        return "served, though it is to be refused"
    return _logits_differ(paged, path if shape.reference is None else shape.reference(reference))


def _logits_differ(paged: PagedModel, reference: Path) -> str | None:
    tokens = random_tokens(NUM_PROMPT + NUM_DECODE, seed=1)
    prompt, decode = tokens[:NUM_PROMPT], tokens[NUM_PROMPT:]
    is_fp8 = paged.config.quantization == "fp8"
    wanted = test_fp8_weights.reference(reference, tokens) if is_fp8 else reference_logits(reference, prompt, decode)
    paged.start(0, NUM_PROMPT)
    rows = [paged.prefill(0, prompt, chunk=17), *(paged.step([(0, token)], []) for token in decode)]
    largest = max(
        (ours - theirs).abs().max().item()
        for ours, theirs in zip(rows, wanted.split([NUM_PROMPT, 1, 1, 1]), strict=True)
    )
    allowed = FP8_TOLERANCE * wanted.abs().max().item() if is_fp8 else TOLERANCE
    return None if largest <= allowed else f"logits differ by {largest:.2g}; at most {allowed:.2g} is allowed"


def _failure(build: Callable[[Path], Path], check: Callable[[Path], None], folder: Path) -> str | None:
    try:
        check(build(folder))
    except (AssertionError, ConfigError) as error:
        return " ".join(str(error).split())[:200]
    return None


def _result(check: Check, folder: Path) -> str | None:
    try:
        return check(folder)
    except Exception as error:  # one shape that fails in an unforeseen way hides none of the others
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _optional(name: str) -> Any:
    return importlib.import_module(name) if importlib.util.find_spec(name) else None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tests.models.published_shapes", description=__doc__)
    parser.add_argument("--only", default="", help="shapes whose names hold this text")
    only = parser.parse_args(arguments).only
    num_shapes = num_wrong = 0
    with tempfile.TemporaryDirectory() as root:
        os.environ["CB_BACKEND_CACHE"] = f"{root}/cache"
        for name, outcome, check in all_checks():
            if only not in name:
                continue
            folder = Path(root, str(num_shapes))
            folder.mkdir()
            wrong = _result(check, folder)
            num_shapes, num_wrong = num_shapes + 1, num_wrong + (wrong is not None)
            said = outcome if outcome == "equal" else f"refused: {outcome}"
            print(f"{'ok   ' if wrong is None else 'WRONG'} {name:<58} {said if wrong is None else wrong}", flush=True)
    print(f"{num_shapes} shapes, {num_wrong} come out otherwise than transformers or the table has them")
    return 1 if num_wrong or not num_shapes else 0


if __name__ == "__main__":
    sys.exit(main())
