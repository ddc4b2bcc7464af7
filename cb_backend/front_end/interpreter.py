"""Which Python interpreter the front end's helper processes run in. Starts nothing."""

from __future__ import annotations

import os
import shutil
import sys

from cb_backend.contracts.errors import ConfigError


def find_python() -> str:
    """An interpreter like the one this code runs in; in the server's stub `sys.executable` need not be one."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    candidates = [
        sys.executable,
        os.path.join(sys.prefix, "bin", version),
        os.path.join(sys.prefix, "bin", "python3"),
        shutil.which(version),
        getattr(sys, "_base_executable", None),
        shutil.which("python3"),
    ]
    for candidate in candidates:
        if candidate and os.path.basename(candidate).startswith("python") and os.access(candidate, os.X_OK):
            return candidate
    raise ConfigError("no Python interpreter found for the engine process; set engine_python in model.json")
