"""What docker/ holds, read for the tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from cb_backend.cli.paths import checkout_path

DOCKER = checkout_path("docker")
BASE = DOCKER / "kubernetes" / "base"
TWO_GPUS = DOCKER / "kubernetes" / "two-gpus"


def documents(path: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document is not None]


def deployment() -> dict[str, Any]:
    return documents(BASE / "deployment.yaml")[0]


def server_flags() -> dict[str, str]:
    """The flags that the pod gives to tritonserver, without their dashes."""
    command, *flags = deployment()["spec"]["template"]["spec"]["containers"][0]["args"]
    assert command == "tritonserver"
    return dict(flag.removeprefix("--").split("=", 1) for flag in flags)


def run_tool(name: str, *arguments: str) -> str:
    """Run a command of this environment; fails with what it printed."""
    command = [str(Path(sys.executable).with_name(name)), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
