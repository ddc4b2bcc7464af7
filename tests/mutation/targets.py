"""Which modules are changed, and which tests must notice."""

from __future__ import annotations

from pathlib import Path

from tests.mutation.journal import fingerprint

ROOT = Path(__file__).parents[2]
_WORLDS = ("tests/mutation/check_worlds.py",)
_SCHEDULING = tuple(
    f"tests/unit/test_{name}.py"
    for name in ("scheduler", "scheduler_cases", "priorities", "prompt_share", "swap", "reserved_share", "pressure")
)
_REUSE = "tests/unit/test_prefix_cache_use.py"
_POINTS = "tests/unit/test_fault_points.py"
_POOL = tuple(f"tests/unit/test_{name}.py" for name in ("block_pool", "kv_manager", "coming_prefixes"))
_TEXT = tuple(f"tests/front_end/test_{name}.py" for name in ("stop_strings", "output_text", "detokenizer"))
TARGETS: dict[str, tuple[str, tuple[str, ...]]] = {
    "scheduler": ("cb_backend.engine.scheduler", ("tests/unit/test_scheduler.py", _POINTS, *_WORLDS, *_SCHEDULING)),
    "admission": ("cb_backend.engine.admission", ("tests/unit/test_admission.py", *_SCHEDULING, _REUSE, *_WORLDS)),
    "request_queue": (
        "cb_backend.engine.request_queue",
        (*(f"tests/unit/test_{name}.py" for name in ("request_queue", "fair_share", "priorities")), *_WORLDS),
    ),
    "fair_share": (
        "cb_backend.engine.fair_share", ("tests/unit/test_fair_share.py", "tests/unit/test_request_queue.py", *_WORLDS)
    ),
    "preemption": ("cb_backend.engine.preemption", (_POINTS, *_WORLDS, *_SCHEDULING)),
    "swap_space": ("cb_backend.engine.swap_space", ("tests/unit/test_swap.py", _POINTS, _REUSE, *_WORLDS)),
    "block_pool": ("cb_backend.kv_cache.block_pool", (*_POOL, *_WORLDS)),
    "manager": ("cb_backend.kv_cache.manager", (*_POOL, _POINTS, _REUSE, *_WORLDS, "tests/unit/test_prompt_share.py")),
    "stop_strings": ("cb_backend.front_end.stop_strings", _TEXT),
    "output_text": ("cb_backend.front_end.output_text", _TEXT),
    "detokenizer": ("cb_backend.front_end.detokenizer", _TEXT),
}  # fmt: skip

# What every test of a target may use.
_HELPERS = ("tests/conftest.py", "tests/fakes/*.py", "tests/simulation/*.py", "tests/unit/__init__.py")


def source_of(module: str) -> Path:
    return ROOT / (module.replace(".", "/") + ".py")


def fingerprints(name: str) -> tuple[str, str]:
    """(of the module, of its tests and what they use)."""
    module, tests = TARGETS[name]
    helpers = [path for pattern in _HELPERS for path in ROOT.glob(pattern)]
    return fingerprint([source_of(module)]), fingerprint([*(ROOT / test for test in tests), *helpers])
