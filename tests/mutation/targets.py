"""Which modules are changed, and which tests must notice."""

from __future__ import annotations

from pathlib import Path

from tests.kept_results import fingerprint

ROOT = Path(__file__).parents[2]
_WORLDS = ("tests/mutation/check_worlds.py",)


def _of(room: str, *names: str) -> tuple[str, ...]:
    return tuple(f"tests/{room}/test_{name}.py" for name in names)


# Of each target those tests come first that know it best: most changes are noticed by the first few. Tests of many
# seconds are left out where others notice as much.
_SCHEDULING = _of(
    "scheduler", "admission", "admission_reserve", "victims", "swap", "lost_copies", "adapters", "reserved_share",
    "priorities",
)  # fmt: skip
_SCHEDULER_AND_POINTS = _of("scheduler", "scheduler", "ends", "fault_points")
_REUSE = _of("scheduler", "prefix_cache_use")
_GROUPS = _of("kv_cache", "grouped_manager", "grouped_needs", "promises", "block_needs")
_POOL = _of("kv_cache", "block_pool", "kv_manager", "coming_prefixes")
_TEXT = _of("front_end", "stop_strings", "output_text", "detokenizer")
_ADAPTERS = ("adapter_store", "adapter_queue", "adapted_requests", "adapter_room")
_SCHEDULER = "cb_backend.engine.scheduler"
TARGETS: dict[str, tuple[str, tuple[str, ...]]] = {
    "scheduler": (
        f"{_SCHEDULER}.scheduler",
        (*_SCHEDULER_AND_POINTS, *_of("scheduler", "edges", "hybrid_prefill", "queue_room"), *_SCHEDULING),
    ),
    "admission": (f"{_SCHEDULER}.admission", (*_SCHEDULING, *_SCHEDULER_AND_POINTS, *_REUSE)),
    "adapter_slots": (f"{_SCHEDULER}.adapter_slots", (*_of("scheduler", "adapter_slots", "adapters"), *_WORLDS)),
    "adapter_line": ("cb_backend.engine.adapter_line", _of("engine", "adapter_line", "adapter_room")),
    "adapter_wait": ("cb_backend.engine.adapter_wait", _of("engine", *_ADAPTERS)),
    "adapters": ("cb_backend.engine.adapters", _of("engine", *_ADAPTERS)),
    "order": (
        f"{_SCHEDULER}.order",
        _of(
            "scheduler", "request_queue", "queue_room", "fair_share", "admission", "reserved_share",
            "prefix_cache_use", "priorities",
        ),
    ),
    "fair_share": (f"{_SCHEDULER}.fair_share", _of("scheduler", "fair_share", "request_queue")),
    "prefill": (
        f"{_SCHEDULER}.prefill",
        _of("scheduler", "prefill", "scheduler", "ends", "prompt_share", "hybrid_prefill", "full_steps"),
    ),
    "preemption": (
        f"{_SCHEDULER}.preemption",
        (
            *_of("scheduler", "victims", "edges"),
            *_SCHEDULER_AND_POINTS, *_SCHEDULING, *_of("scheduler", "block_waits", "windows"),
        ),
    ),
    "plan": (
        f"{_SCHEDULER}.plan",
        (
            *_of("scheduler", "bounds"),
            *_SCHEDULER_AND_POINTS,
            *_of("scheduler", "results", "swap", "lost_copies", "adapters", "victims", "admission", "windows"),
        ),
    ),
    "results": (
        f"{_SCHEDULER}.results",
        (
            *_of("scheduler", "results"),
            *_SCHEDULER_AND_POINTS,
            *_REUSE,
            *_of("scheduler", "swap", "lost_copies", "adapters"),
        ),
    ),
    "slots": (
        f"{_SCHEDULER}.slots",
        (*_of("scheduler", "bounds"), *_SCHEDULER_AND_POINTS, *_of("scheduler", "counters"), *_SCHEDULING),
    ),
    "pace": (f"{_SCHEDULER}.pace", _of("scheduler", "pace", "prompt_share", "large_steps", "hybrid_prefill")),
    "large_steps": (f"{_SCHEDULER}.large_steps", _of("scheduler", "large_steps", "pace")),
    "step_time_model": (f"{_SCHEDULER}.step_time_model", _of("scheduler", "pace", "prompt_share", "non_negative")),
    "stats": (f"{_SCHEDULER}.stats", _of("scheduler", "results", "pressure", "counters")),
    "swap_space": (
        "cb_backend.kv_cache.swap_space",
        (*_of("scheduler", "swap", "lost_copies", "fault_points"), *_REUSE, *_WORLDS),
    ),
    "block_pool": ("cb_backend.kv_cache.block_pool", (*_POOL, *_WORLDS)),
    "layout": ("cb_backend.kv_cache.layout", _of("kv_cache", "layout")),
    "manager": (
        "cb_backend.kv_cache.manager",
        (*_POOL, *_of("scheduler", "fault_points", "prefix_cache_use", "prompt_share"), *_WORLDS),
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
