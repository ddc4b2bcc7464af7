"""Which modules are changed, and which tests must notice."""

from __future__ import annotations

from pathlib import Path

from tests.kept_results import fingerprint

ROOT = Path(__file__).parents[2]
_WORLDS = ("tests/mutation/check_worlds.py",)
_SCHEDULING = tuple(
    f"tests/scheduler/test_{name}.py"
    for name in (
        "admission",
        "victims",
        "scheduler",
        "scheduler_cases",
        "priorities",
        "prompt_share",
        "swap",
        "reserved_share",
        "pressure",
        "block_waits",
    )
)
_DIR = "tests/scheduler"
_ADAPTERS = f"{_DIR}/test_adapters.py"
_COUNTERS = f"{_DIR}/test_counters.py"
_GROUPS = tuple(f"tests/kv_cache/test_{name}.py" for name in ("grouped_manager", "promises", "block_needs"))
_REUSE = "tests/scheduler/test_prefix_cache_use.py"
_POINTS = "tests/scheduler/test_fault_points.py"
_POOL = tuple(f"tests/kv_cache/test_{name}.py" for name in ("block_pool", "kv_manager", "coming_prefixes"))
_TEXT = tuple(f"tests/front_end/test_{name}.py" for name in ("stop_strings", "output_text", "detokenizer"))
_SCHEDULER = "cb_backend.engine.scheduler"
TARGETS: dict[str, tuple[str, tuple[str, ...]]] = {
    "scheduler": (
        f"{_SCHEDULER}.scheduler",
        (
            *(f"tests/scheduler/test_{name}.py" for name in ("scheduler", "hybrid_prefill", "queue_room")),
            _POINTS,
            *_WORLDS,
            *_SCHEDULING,
        ),
    ),
    "admission": (f"{_SCHEDULER}.admission", (*_SCHEDULING, _ADAPTERS, _REUSE, *_WORLDS)),
    "adapter_slots": (f"{_SCHEDULER}.adapter_slots", (f"{_DIR}/test_adapter_slots.py", _ADAPTERS, *_WORLDS)),
    "order": (
        f"{_SCHEDULER}.order",
        (
            *(f"tests/scheduler/test_{name}.py" for name in ("request_queue", "queue_room", "fair_share")),
            *(f"tests/scheduler/test_{name}.py" for name in ("priorities", "admission")),
            *(f"tests/scheduler/test_{name}.py" for name in ("reserved_share", "prompt_share")),
            _REUSE,
            *_WORLDS,
        ),
    ),
    "fair_share": (
        f"{_SCHEDULER}.fair_share",
        ("tests/scheduler/test_fair_share.py", "tests/scheduler/test_request_queue.py", *_WORLDS),
    ),
    "prefill": (
        f"{_SCHEDULER}.prefill",
        (
            *(f"tests/scheduler/test_{name}.py" for name in ("prompt_share", "hybrid_prefill", "full_steps")),
            "tests/scheduler/test_scheduler.py",
            *_WORLDS,
        ),
    ),
    "preemption": (f"{_SCHEDULER}.preemption", (_POINTS, *_WORLDS, *_SCHEDULING)),
    "plan": (
        f"{_SCHEDULER}.plan",
        (*(f"{_DIR}/test_{name}.py" for name in ("scheduler", "windows")), _POINTS, *_SCHEDULING, *_WORLDS),
    ),
    "results": (
        f"{_SCHEDULER}.results",
        (
            *(f"{_DIR}/test_{name}.py" for name in ("results", "scheduler")),
            _COUNTERS,
            _POINTS,
            *_SCHEDULING,
            _REUSE,
            *_WORLDS,
        ),
    ),
    "slots": (f"{_SCHEDULER}.slots", (f"{_DIR}/test_scheduler.py", _COUNTERS, _POINTS, *_SCHEDULING, *_WORLDS)),
    "pace": (
        f"{_SCHEDULER}.pace",
        tuple(f"{_DIR}/test_{name}.py" for name in ("pace", "non_negative", "prompt_share", "hybrid_prefill")),
    ),
    "stats": (f"{_SCHEDULER}.stats", tuple(f"{_DIR}/test_{name}.py" for name in ("results", "pressure", "counters"))),
    "swap_space": ("cb_backend.kv_cache.swap_space", ("tests/scheduler/test_swap.py", _POINTS, _REUSE, *_WORLDS)),
    "block_pool": ("cb_backend.kv_cache.block_pool", (*_POOL, *_WORLDS)),
    "layout": ("cb_backend.kv_cache.layout", ("tests/kv_cache/test_layout.py",)),
    "manager": (
        "cb_backend.kv_cache.manager",
        (*_POOL, _POINTS, _REUSE, *_WORLDS, "tests/scheduler/test_prompt_share.py"),
    ),
    "grouped_manager": ("cb_backend.kv_cache.grouped_manager", (*_GROUPS, *_WORLDS)),
    "group_prefix": ("cb_backend.kv_cache.group_prefix", (*_GROUPS, *_WORLDS)),
    "promises": ("cb_backend.kv_cache.promises", (*_GROUPS, *_WORLDS)),
    "block_needs": ("cb_backend.kv_cache.block_needs", (*_GROUPS, *_WORLDS)),
    "stop_strings": ("cb_backend.front_end.text.stop_strings", _TEXT),
    "output_text": ("cb_backend.front_end.text.output_text", _TEXT),
    "detokenizer": ("cb_backend.front_end.text.detokenizer", _TEXT),
}  # fmt: skip
# What every test of a target may use.
_HELPERS = ("tests/conftest.py", "tests/*/conftest.py", "tests/fakes/*.py", "tests/simulation/*.py")


def source_of(module: str) -> Path:
    return ROOT / (module.replace(".", "/") + ".py")


def fingerprints(name: str) -> tuple[str, str]:
    """(of the module, of its tests and what they use)."""
    module, tests = TARGETS[name]
    helpers = [path for pattern in _HELPERS for path in ROOT.glob(pattern)]
    return fingerprint([source_of(module)]), fingerprint([*(ROOT / test for test in tests), *helpers])
