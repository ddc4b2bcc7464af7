"""`kernels/bench_adapters.py swap`: each of its cases is what its name says."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from tests.models.tiny_checkpoints import write_checkpoint

ROOT = Path(__file__).resolve().parents[2]


def test_adapters_come_from_where_the_line_says(tmp_path: Path) -> None:
    folder = write_checkpoint("llama-gqa", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 4096}))
    command = [sys.executable, "kernels/bench_adapters.py", "swap", "--model", str(folder), "--streams", "2"]
    command += ["--seconds", "0.8"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    lines = re.findall(r"^(.*?) +(\d+) gaps .* (\d+) loads to the device$", done.stdout, re.MULTILINE)
    assert all(int(num_gaps) > 0 for _, num_gaps, _ in lines)
    loads = {name.strip(): int(num_loads) for name, _, num_loads in lines}
    assert loads["no adapter"] == loads["one that stays"] == 0
    # Six folders and two places: each is new again.
    assert loads["from host memory"] >= 6
    assert loads["from files"] >= 6
