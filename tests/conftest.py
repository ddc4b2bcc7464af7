"""What holds for all tests.

Kernels on a machine without a GPU run under Triton's interpreter, which reads its switch when triton is imported. So
the switch is set here, before any test module can import triton. Nothing but tests/kernels runs kernels there.

Hypothesis draws the same examples in every run, so that a test does not fail where nothing has changed, and however
slowly a busy machine draws them. `pytest --hypothesis-profile=default` draws others.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

if importlib.util.find_spec("hypothesis"):  # the tests for a GPU run without it
    from hypothesis import HealthCheck, settings

    settings.register_profile("steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("steady")
