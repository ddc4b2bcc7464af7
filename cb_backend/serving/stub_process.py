"""The process that the server starts for a front end: what must be so in it before anything else is done."""

from __future__ import annotations

import logging
import sys

import numpy as np
import triton_python_backend_utils as pb_utils

from cb_backend.contracts.errors import ConfigError


def refuse_unusable_numpy() -> None:
    """Stubs before 24.11 abort with numpy 2 at the first string tensor, taking every open stream with them."""
    is_old_stub = not hasattr(pb_utils.InferenceResponse, "parameters")
    if is_old_stub and int(np.__version__.partition(".")[0]) >= 2:
        raise ConfigError(
            f"this server's Python backend cannot work with numpy {np.__version__}; install 'numpy<2' for the "
            "server's Python (the engine can have another one: engine_python in model.json)"
        )


def configure_logging(instance_name: str) -> None:
    root = logging.getLogger("cb_backend")
    if not root.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(f"%(asctime)s {instance_name} %(levelname)s %(message)s"))
        root.addHandler(handler)
        root.setLevel(logging.INFO)
        root.propagate = False
