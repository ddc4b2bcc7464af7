"""A model over two GPUs gives what one gives, whichever way they add up, and its process ends. Needs two that this
process sees. Side by side: pytest -n 6 tests/llm/test_ranks_on_gpu.py"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.llm.two_gpus import CHECKS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("way", ["peers", "nccl"])
@pytest.mark.parametrize("check", CHECKS)
def test_two_gpus(check: str, way: str, checkpoint: Path) -> None:
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.llm.two_gpus", check, str(checkpoint), way]
    program = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        told, _ = program.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        program.send_signal(signal.SIGABRT)  # it tells where each thread stands
        try:
            told, _ = program.communicate(timeout=10)
        except subprocess.TimeoutExpired as error:
            told = (error.output or b"").decode()
        pytest.fail(f"{check} {way} has not ended; it told:\n{told[-6000:]}")
    finally:
        program.kill()
    assert program.returncode == 0, told[-6000:]
