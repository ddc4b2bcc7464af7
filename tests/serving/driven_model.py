"""The model class in a test's own process, driven as the server drives it, with an engine that counts."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.counting_runner import write_byte_tokenizer
from tests.serving.fake_server import InferenceRequest

LONG = {"max_tokens": 3000}


def make_repository(folder: Path, **arguments: Any) -> Path:
    write_byte_tokenizer(folder / "tokenizer")
    (folder / "llm" / "1").mkdir(parents=True)
    model = {"model": str(folder / "tokenizer"), "worker_cls": "tests.fakes.counting_runner:create_runner"}
    (folder / "llm" / "1" / "model.json").write_text(json.dumps({**model, **arguments}))
    return folder / "llm"


def server_args(model: Path, instance: int = 0, **config: Any) -> dict[str, str]:
    return {
        "model_name": "llm",
        "model_version": "1",
        "model_repository": str(model),
        "model_instance_name": f"llm_0_{instance}",
        "model_config": json.dumps({"name": "llm", **config}),
    }


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A short path: sockets live below it."""
    folder = Path(tempfile.mkdtemp(prefix="cb-", dir="/tmp"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(folder))
        patch.setenv("CB_TEST_STEP_S", "0.005")
        patch.setenv("CB_TEST_GATE", str(folder / "gate"))  # while it exists, no engine comes to serve
        yield folder
    assert list((folder / f"cb_backend-{os.getuid()}").iterdir()) == []
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[Any]:
    from cb_backend.serving.backend import TritonPythonModel

    model = TritonPythonModel()
    model.initialize(server_args(make_repository(folder / "shared", max_num_seqs=8)))
    yield model
    model.finalize()


def ask(model: Any, text: str, stream: bool = True, sampling: Any = None, **inputs: Any) -> InferenceRequest:
    """Hand one request to the model; `sampling` is a dict or raw JSON text."""
    sampling = sampling if isinstance(sampling, str) else json.dumps(sampling or {})
    request = InferenceRequest({"text_input": text, "stream": stream, "sampling_parameters": sampling, **inputs})
    model.execute([request])
    return request


def num_in_engine(model: Any) -> int:
    stats = model._client.members[0].stats
    return -1 if stats is None else stats.num_running + stats.num_waiting
