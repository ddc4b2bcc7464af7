"""The package as a backend of the server: model directories of config.pbtxt and model.json alone.

pytest tests/server/test_backends.py
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.server.conftest import running_server
from tests.server.tiny_checkpoint import Reference

pytestmark = pytest.mark.server

# What a directory made for vllm_backend says of itself: no tensors, no policy, no door.
PEER_CONFIG = 'backend: "vllm"\ninstance_group [ { count: 1 kind: KIND_MODEL } ]\n'
PEER_ARGUMENTS = {"gpu_memory_utilization": 0.1, "enforce_eager": True, "disable_log_requests": "true"}
OWN_CONFIG = 'backend: "cb_backend"\n'


def make_models(repository: Path, checkpoint: Path) -> None:
    """Replace `llm` by a model for each name of the backend."""
    arguments = {"model": str(checkpoint), "kv_cache_memory_bytes": 8 << 20}
    shutil.rmtree(repository / "llm")
    for name, config, more in (("llm", OWN_CONFIG, {}), ("vllm_model", PEER_CONFIG, PEER_ARGUMENTS)):
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "config.pbtxt").write_text(config)
        (repository / name / "1" / "model.json").write_text(json.dumps({**arguments, **more}))


def test_models_without_a_door(checkpoint: Path, reference: Reference, tmp_path: Path) -> None:
    with running_server(checkpoint, tmp_path, prepare=lambda repository: make_models(repository, checkpoint)) as server:
        assert len(server.engine_pids()) == 2
        body = {"text_input": "the quick", "sampling_parameters": '{"temperature": "0", "max_tokens": "12"}'}
        for model in ("llm", "vllm_model"):
            status, text = server.post(f"/v2/models/{model}/generate", {**body, "exclude_input_in_output": True})
            assert (status, json.loads(text)["text_output"]) == (200, reference.greedy_text("the quick", 12))
