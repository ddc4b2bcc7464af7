"""Where the device's time went: kernels by kind, and the share of the time in which it ran any.

Works on events (a name and two times), whoever recorded them; knows no profiler, no engine and no device. Kernels may
overlap (dependent launches, copies on another stream), so their sum can exceed the time that passed: the busy share is
that of the union of their intervals.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

MAX_KINDS = 20  # in a table; the rest is one line
COPIES = "copies, memsets"
# The first that matches the beginning of a name, but for the library's products, which may stand anywhere in it.
_KINDS = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        (COPIES, r"Memcpy |Memset "),
        ("decode attention", r"_decode_attention_kernel"),
        ("decode plan", r"_plan_kernel"),
        ("prefill attention", r"_prefill_attention_kernel"),
        ("products, ours", r"_linear_kernel|_one_row_kernel|_linear_packed_kernel|_packed_few_rows_kernel"),
        ("products of experts", r"_grouped_linear_kernel|_grouped_packed_kernel"),
        ("routing of experts", r"_route_few_kernel|_route_kernel|_plan_experts_kernel|_gate_rows_kernel"),
        ("adapters", r"_lora_(shrink|expand|expand_gated)_kernel|_plan_adapters_kernel"),
        ("weights written out", r"_dequantise_packed_kernel"),
        ("norms", r"_rms_norm_kernel"),
        ("norms of sums over devices", r"_reduce_norm_kernel"),
        ("activation", r"_silu_mul_kernel"),
        ("qkv post", r"_qkv_post_kernel"),
        ("fp8 rows", r"_quantize_kernel"),
        ("sampler", r"_bound_kernel|_choose_kernel"),
        ("logits rules", r"_apply_marks_kernel|_apply_token_bitmask_kernel|_mask_stop_ids_kernel|_cap_logits_kernel"),
        ("log-probabilities", r"_tile_logprobs_kernel|_merge_logprobs_kernel"),
        ("step state", r"_(prepare_rows|commit_tokens|join_slots|apply_deltas)_kernel"),
        ("products, library", r"(?i).*(nvjet|gemm|gemv|cutlass|cublas|splitk|xmma)"),
        ("products, library", r"aten::(mm|addmm|bmm|baddbmm|linear|matmul|_scaled_mm|mv|addmv|dot)$"),
        ("attention, library", r"aten::_?(scaled_dot_product|flash|efficient)\w*attention"),
    )
)
_MAX_NAME = 32  # characters of a name of no kind


@dataclass(frozen=True, slots=True)
class Event:
    """A kernel or a copy on the device; without one an operator on the CPU. Microseconds of one clock."""

    name: str
    start: float
    end: float
    own: float  # of its time, what no other event inside it accounts for; a kernel: all of it


def kind_of(name: str) -> str:
    """What an event counts as; its own shortened name where that is not known."""
    for kind, pattern in _KINDS:
        if pattern.match(name):
            return kind
    return short_name(name)


def short_name(name: str) -> str:
    """A C++ kernel's name without return type, namespaces, template arguments and parameters."""
    plain = name.replace("(anonymous namespace)::", "").removeprefix("void ")
    is_operator = plain.startswith("aten::")
    plain = re.split(r"[<(]", plain, maxsplit=1)[0]
    if not is_operator:
        plain = plain.rsplit("::", 1)[-1]
    return plain.strip()[:_MAX_NAME] or name[:_MAX_NAME]


def union_length(intervals: Iterable[tuple[float, float]]) -> float:
    """The time that at least one of the intervals (start, end) covers."""
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        if end > reached:
            covered += end - max(start, reached)
            reached = end
    return covered


def summarize(events: Sequence[Event], num_steps: int) -> dict[str, Any]:
    """Figures of the events of `num_steps` steps: the longest kinds first, and how much of the time was busy.

    `wall_us` is from the first event's start to the last one's end; copies are a kind, but do not make it busy.
    """
    launches: defaultdict[str, int] = defaultdict(int)
    own: defaultdict[str, float] = defaultdict(float)
    intervals = []
    for event in events:
        kind = kind_of(event.name)
        launches[kind] += 1
        own[kind] += event.own
        if kind != COPIES:
            intervals.append((event.start, event.end))
    wall = max((event.end for event in events), default=0.0) - min((event.start for event in events), default=0.0)
    busy, total = union_length(intervals), sum(own.values())
    order = sorted(own, key=lambda kind: -own[kind])
    named, rest = (order, []) if len(order) <= MAX_KINDS else (order[: MAX_KINDS - 1], order[MAX_KINDS - 1 :])
    groups = [(kind, [kind]) for kind in named]
    if rest:
        groups.append((f"others ({len(rest)} kinds)", rest))
    steps = max(num_steps, 1)
    return {
        "steps": num_steps,
        "wall_us": round(wall, 1),
        "busy_us": round(busy, 1),
        "busy_share": round(busy / wall, 4) if wall else None,
        "sum_us": round(total, 1),
        "kinds": [
            {
                "kind": name,
                "launches_per_step": round(sum(launches[kind] for kind in kinds) / steps, 2),
                "us_per_step": round(sum(own[kind] for kind in kinds) / steps, 2),
                "share": round(sum(own[kind] for kind in kinds) / total, 4) if total else None,
            }
            for name, kinds in groups
        ],
    }


def window_table(window: dict[str, Any]) -> str:
    """The lines of one profiled window: what it covers, its kinds, and its busy share last."""
    what = "kernels" if window["is_device"] else "operators on the CPU"
    title = (
        f"{what} of steps {window['first_step']} to {window['first_step'] + window['steps'] - 1} of"
        f" {window['pass_steps']}, {window['steps_with_prompts']} of them with prompts"
    )
    if not window["kinds"]:
        return f"{title}: the profiler saw none"
    lines = [title, f"{'kind':{_MAX_NAME}s} {'a step':>8s} {'us a step':>10s} {'us each':>9s} {'share':>6s}"]
    lines += [
        f"{kind['kind']:{_MAX_NAME}s} {kind['launches_per_step']:8.1f} {kind['us_per_step']:10.1f}"
        f" {_each(kind):>9s} {kind['share'] or 0:6.1%}"
        for kind in window["kinds"]
    ]
    steps = max(window["steps"], 1)
    lines.append(
        f"{'device' if window['is_device'] else 'operators'} busy {window['busy_share'] or 0:.1%} of"
        f" {window['wall_us'] / steps:,.1f} us a step under the profiler; sum of all {window['sum_us'] / steps:,.1f} us"
    )
    return "\n".join(lines)


def _each(kind: dict[str, Any]) -> str:
    launches = kind["launches_per_step"]
    return f"{kind['us_per_step'] / launches:.2f}" if launches else "-"
