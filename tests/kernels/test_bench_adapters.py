"""`kernels/bench_adapters.py swap`: each of its cases is what its name says."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from tests.models.tiny_checkpoints import write_checkpoint

ROOT = Path(__file__).resolve().parents[2]
NUM_REQUESTS, NUM_FOLDERS = 8, 6
LINE = re.compile(r"^(.*?) +(\d+) gaps .* (\d+) loads to the device, (\d+) reads of files$", re.MULTILINE)


def test_adapters_come_from_where_the_line_says(tmp_path: Path) -> None:
    """Six folders in turn and two places: each is new to the device again, and to a host that keeps two as well."""
    folder = write_checkpoint("llama-gqa", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 4096}))
    command = [sys.executable, "kernels/bench_adapters.py", "swap", "--model", str(folder), "--streams", "2"]
    command += ["--seconds", str(NUM_REQUESTS / 10)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    found = {name.strip(): tuple(map(int, numbers)) for name, *numbers in LINE.findall(done.stdout)}
    assert all(num_gaps > 0 for num_gaps, _, _ in found.values())
    counts = {name: numbers[1:] for name, numbers in found.items()}
    assert counts["no adapter"] == counts["one that stays"] == (0, 0)
    num_loads, num_reads = counts["from host memory"]
    assert num_loads >= NUM_FOLDERS
    assert num_reads == 0
    num_loads, num_reads = counts["from files"]
    assert num_loads >= NUM_FOLDERS
    assert num_reads >= NUM_FOLDERS
