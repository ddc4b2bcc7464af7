"""What the processes of a start import: of the large packages only those that they cannot do without."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models.tiny_checkpoints import write_checkpoint

# Seconds each, for nothing that serving needs.
NEVER = ("transformers", "sympy", "scipy", "pandas", "matplotlib", "torch._dynamo", "torch._inductor", "torchvision")
NO_MODEL_HERE = ("torch", "triton", *NEVER)


def imported(code: str, *arguments: str) -> set[str]:
    script = f"{code}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_an_engine_that_has_started_and_answered_needs_nothing_beside_torch_and_triton(tmp_path: Path) -> None:
    write_checkpoint("llama-gqa", tmp_path)
    code = """
import sys
import cb_backend.engine.engine_process
from cb_backend.engine.llm_engine import create_engine
from cb_backend.contracts.config import engine_config_from_dict
from cb_backend.contracts.token_rules import TokenRules
import numpy as np
values = {"model": sys.argv[1], "device": "cpu", "dtype": "float32", "num_gpu_blocks_override": 60}
engine = create_engine(engine_config_from_dict(values))
engine.add_request(engine.make_request(1, np.arange(5, dtype=np.int32), TokenRules(max_tokens=3)))
while engine.has_unfinished():
    engine.step()
engine.close()
"""
    of_torch = imported("import torch")
    found = imported(code, str(tmp_path))
    assert "torch" in found
    assert not (found - of_torch) & set(NEVER)


@pytest.mark.parametrize(
    "module",
    [
        "cb_backend.cli.serve",
        "cb_backend.cli.demo",
        "cb_backend.front_end.engines.engine_keeper",
        "cb_backend.front_end.text.chat",
        "cb_backend.gateway.app",
    ],
)
def test_who_only_serves_imports_no_framework(module: str) -> None:
    """The model's process of the server, the gateway and the command that starts them compute nothing."""
    assert not imported(f"import {module}") & set(NO_MODEL_HERE)
