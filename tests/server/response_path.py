"""The response path under an engine that costs nothing: a real server with 1, 2 and 4 front ends, and the measurement.

    python -m tests.server.response_path --seconds 10 --streams 64     # options of client/response_path.py
    CB_TEST_STEP_S=0.02 python -m tests.server.response_path           # the engine takes 20 ms a step

Each model has an engine of its own that counts letters (`tests/fakes/counting_runner.py`).
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from cb_backend.cli.paths import checkout_path
from cb_backend.cli.server.local_server import find_server
from cb_backend.cli.server.model_repository import copy_with_model
from cb_backend.cli.server.server_process import ServerOptions, ServerProcess, free_ports
from tests.fakes.counting_runner import write_byte_tokenizer

FRONT_ENDS = (1, 2, 4)


def make_repository(folder: Path, front_ends: tuple[int, ...] = FRONT_ENDS) -> dict[str, Path]:
    """Models `front_ends_N` in `folder`/models; returns their folders by name."""
    tokenizer, repository = folder / "tokenizer", folder / "models"
    write_byte_tokenizer(tokenizer)
    arguments = {"model": str(tokenizer), "worker_cls": "tests.fakes.counting_runner:create_letters_runner"}
    models = {}
    for count in front_ends:
        made = copy_with_model(checkout_path("model_repository/llm"), str(tokenizer), folder / str(count), count)
        model = repository / f"front_ends_{count}"
        repository.mkdir(exist_ok=True)
        (made / "llm").rename(model)
        (model / "1" / "model.json").write_text(json.dumps(arguments))
        models[model.name] = model
    return models


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        models = make_repository(Path(folder))
        options = ServerOptions(Path(folder) / "models", "127.0.0.1", *free_ports(3), exit_timeout_secs=5)
        process = ServerProcess(find_server(), options)
        process.start()
        try:
            process.wait_ready(120.0)
            client = [sys.executable, str(checkout_path("client/response_path.py")), "--url", process.grpc_address]
            return subprocess.run([*client, *sys.argv[1:], "--models", *models], check=False).returncode
        finally:
            process.stop()


if __name__ == "__main__":
    sys.exit(main())
