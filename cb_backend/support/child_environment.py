"""The environment of a process that runs modules of this package: engines, and the ranks of one."""

from __future__ import annotations

import os
from pathlib import Path


def child_environment() -> dict[str, str]:
    """Ours, with waiting threads that sleep, and this package importable.

    From an installed package nothing is added: another interpreter must not see this one's site-packages.
    """
    environment = dict(os.environ)
    # On a CPU, threads that wait for each other must sleep: where spinning ones share cores with others (2 cores, load
    # 9), a decode step of the demo model took 7 s instead of 0.9 s.
    environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    root = Path(__file__).resolve().parents[2]
    if root.name not in ("site-packages", "dist-packages"):
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), environment.get("PYTHONPATH")]))
    return environment
