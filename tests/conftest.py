"""Kernels on a machine without a GPU run under Triton's interpreter, which reads its switch when triton is imported.

So the switch is set here, before any test module can import triton. Nothing but tests/kernels runs kernels there.
"""

from __future__ import annotations

import os
from pathlib import Path

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
