"""Compile the kernels for GPUs that are not here, exactly as their launchers would launch them.

A launcher is called with CPU tensors while its kernels are replaced by recorders; what the recorders saw (types,
alignment, constants, options) is compiled for the architecture asked for. It must not run under TRITON_INTERPRET: tests
compile by `compiled.compile_all`.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from cb_backend.engine.runner.device_state import new_slot_state
from cb_backend.engine.runner.step_buffers import make_buffers, padding
from cb_backend.engine.step_shapes import StepShape
from cb_backend.kernels.launch import overriding
from cb_backend.kernels.row_sampling import neutral_rows
from cb_backend.kernels.slot_state import NUM_JOINED_WORDS, SlotState
from tests.kernels.expert_cases import EXPERT_LAUNCHES
from tests.kernels.lora_cases import LORA_LAUNCHES
from tests.kernels.product_launches import PRODUCT_LAUNCHES

POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int16: "*i16",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
}
OPTIONS = ("num_warps", "num_stages", "launch_pdl", "maxnreg")
# Ops that do not name their module.
MODULES = {
    "cap_logits": "softcap", "apply_marks": "token_marks", "quantize_rows": "fp8",
    "apply_token_bitmask": "token_bitmask",
    "join_slots": "slot_state", "apply_deltas": "slot_state", "prepare_rows": "step_rows",
    "commit_tokens": "step_rows", "mask_stop_ids": "step_rows",
}  # fmt: skip
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


class Recorder:
    """Stands where a kernel stands; keeps the arguments of its launch."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.launch: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **kwargs: setattr(self, "launch", (args, kwargs))

    def source(self, overrides: dict[str, int]) -> tuple[ASTSource, dict[str, int]]:
        """The recorded launch as Triton's compiler wants it."""
        assert self.launch is not None
        args, kwargs = self.launch
        kwargs = {**kwargs, **overrides}
        names = self.kernel.arg_names
        signature, constants, attrs = {}, {}, {}
        for index, name in enumerate(names):
            value = args[index] if index < len(args) else kwargs[name]
            if isinstance(value, torch.Tensor):
                signature[name] = POINTERS[value.dtype]
                if not self.kernel.params[index].do_not_specialize_on_alignment:
                    attrs[(index,)] = [["tt.divisibility", 16]]
            elif isinstance(value, tuple):  # of tensors
                signature[name] = tuple(POINTERS[tensor.dtype] for tensor in value)
                attrs |= {(index, place): [["tt.divisibility", 16]] for place in range(len(value))}
            elif self.kernel.params[index].is_constexpr or value is None or value == 1:
                signature[name], constants[name] = "constexpr", value
            elif isinstance(value, float):
                signature[name] = "fp32"
            else:
                signature[name] = "i32"
                if value % 16 == 0 and name not in (self.kernel.do_not_specialize or ()):
                    attrs[(index,)] = [["tt.divisibility", 16]]
        options = {name: kwargs[name] for name in OPTIONS if name in kwargs}
        return ASTSource(self.kernel, signature, constants, attrs), options


def record(op: str, kernel: str, call: dict[str, Any], arch: int) -> Recorder:
    """Call `cb_backend.kernels.<op>`'s launcher on small tensors of the case's shapes; return what it launched.

    Launches are dependent ones where the architecture has them.
    """
    can_overlap = arch >= 90
    stand_ins = {
        "needs_twin": lambda tensor: False,
        "can_overlap": lambda device: can_overlap,
        "dependent_options": lambda device, num_rows=1: {"launch_pdl": True} if can_overlap else {},
    }
    launched = importlib.import_module(f"cb_backend.kernels.{MODULES.get(op, op)}")
    recorders: dict[str, Recorder] = {}
    originals: list[tuple[Any, str, Any]] = []
    for module in [value for name, value in sys.modules.items() if name.startswith("cb_backend.kernels.")]:
        for name, value in list(vars(module).items()):
            if name.endswith("_kernel") and hasattr(value, "arg_names"):
                originals.append((module, name, value))
                setattr(module, name, recorders.setdefault(name, Recorder(value)))
        for name, stand_in in stand_ins.items():
            if hasattr(module, name):
                originals.append((module, name, getattr(module, name)))
                setattr(module, name, stand_in)
    try:
        LAUNCHES[op](launched, **call)
    finally:
        for module, name, value in originals:
            setattr(module, name, value)
    return recorders[kernel]


def _attention(
    num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: str, kv_dtype: str | None = None
) -> dict[str, Any]:
    kind, kv_kind = getattr(torch, dtype), getattr(torch, kv_dtype or dtype)
    return {
        "q": torch.zeros(2, num_heads, head_dim, dtype=kind),
        "kv_cache": torch.zeros(2, 2, num_kv_heads, block_size, head_dim, dtype=kv_kind),
        "block_tables": torch.zeros(2, 16, dtype=torch.int32),
        "slots": torch.zeros(2, dtype=torch.int32),
        "seq_lens": torch.ones(2, dtype=torch.int32),
        "scale": 0.1,
    }


def _decode(module: Any, window: int = 0, softcap: float = 0.0, **shapes: Any) -> None:
    arguments = _attention(**shapes)
    module.decode_attention(**arguments, window=window, softcap=softcap, plans=_plans(module, arguments, window))


def _plans(module: Any, arguments: dict[str, Any], window: int) -> dict[int, Any]:
    """As in a step: the plan is there before the first layer."""
    return {window: module.plan_decode(arguments["seq_lens"], arguments["kv_cache"], window)}


def _prefill(module: Any, window: int = 0, softcap: float = 0.0, **shapes: Any) -> None:
    starts = torch.tensor([0, 1, 2], dtype=torch.int32)
    module.prefill_attention(
        **_attention(**shapes), window=window, softcap=softcap, query_start_loc=starts, max_query_len=1
    )


def _rms_norm(
    module: Any,
    hidden_size: int,
    op: str = "add_rms_norm",
    weight_dtype: str = "bfloat16",
    has_post: bool = False,
    num_parts: int = 1,
    **options: Any,
) -> None:
    x, weight = torch.zeros(2, hidden_size, dtype=torch.bfloat16), torch.zeros(hidden_size)
    weight = weight.to(getattr(torch, weight_dtype))
    parts = x if num_parts == 1 else torch.zeros(2, num_parts, hidden_size, dtype=torch.bfloat16)
    getattr(module, op)(parts, x, weight, 1e-6, post_weight=weight if has_post else None, **options)


def _reduce_norm(module: Any, hidden_size: int, num_ranks: int) -> None:
    table = torch.zeros(module.MAX_RANKS, dtype=torch.int64)
    step, failed = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    peers = module.Peers(torch.stack((table, table)), table, table, step, failed, 0, num_ranks)
    x, weight = (torch.zeros(size, dtype=torch.bfloat16) for size in ((2, hidden_size), (hidden_size,)))
    module.reduce_add_norm(peers, 0, x, weight, 1e-6)


def _silu_mul(module: Any, intermediate_size: int, op: str = "silu_mul") -> None:
    getattr(module, op)(torch.zeros(2, 2 * intermediate_size, dtype=torch.bfloat16))


def _cap_logits(module: Any, vocab_size: int) -> None:
    module.cap_logits(torch.zeros(2, vocab_size, dtype=torch.bfloat16), 30.0)


def _qkv_post(
    module: Any,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    has_norm: bool,
    kv_dtype: str = "bfloat16",
    num_tokens: int = 2,
    norm_dtype: str = "bfloat16",
    has_q_scale: bool = False,
    **options: Any,
) -> None:
    kv_cache = torch.zeros(2, 2, num_kv_heads, 16, head_dim, dtype=getattr(torch, kv_dtype))
    tokens = torch.zeros(num_tokens, dtype=torch.int32)
    norm = torch.zeros(head_dim, dtype=getattr(torch, norm_dtype)) if has_norm else None
    module.qkv_post(
        torch.zeros(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype=torch.bfloat16),
        torch.zeros(4, head_dim + has_q_scale), tokens, tokens, kv_cache,
        num_heads, num_kv_heads, head_dim, norm, norm, **options,
    )  # fmt: skip


def _sample(module: Any, vocab_size: int) -> None:
    logits = torch.zeros(2, vocab_size, dtype=torch.bfloat16)
    module.sample(logits, neutral_rows(2, logits.device), torch.zeros(2, dtype=torch.int64))


def _top_logprobs(module: Any, vocab_size: int) -> None:
    rows, logits = torch.zeros(2, dtype=torch.int64), torch.zeros(2, vocab_size, dtype=torch.bfloat16)
    module.top_logprobs(logits, rows, rows.int(), 5)


def _apply_marks(module: Any, vocab_size: int) -> None:
    rows, marks = torch.zeros(2, dtype=torch.int64), torch.zeros(2, vocab_size, dtype=torch.int32)
    module.apply_marks(marks.float(), rows, marks, rows, torch.zeros(2, 3))


def _apply_token_bitmask(module: Any, vocab_size: int) -> None:
    bitmask = torch.zeros(2, -(-vocab_size // 32), dtype=torch.int32)
    module.apply_token_bitmask(torch.zeros(2, vocab_size), bitmask, torch.zeros(2, dtype=torch.int64))


def _slots(max_blocks: int = 256) -> SlotState:
    return new_slot_state(2, max_blocks, torch.device("cpu"))


def _join_slots(module: Any) -> None:
    state = _slots()
    module.join_slots(torch.zeros(2, NUM_JOINED_WORDS + state.stop_ids.shape[1], dtype=torch.int32), state)


def _apply_deltas(module: Any, max_blocks: int) -> None:
    module.apply_deltas(_slots(max_blocks).block_tables, torch.zeros(16, 3, dtype=torch.int32))


def _prepare_rows(module: Any, max_blocks: int, block_size: int) -> None:
    buffers = make_buffers(StepShape(2), padding(StepShape(2), 2), torch.device("cpu"))
    module.prepare_rows(buffers.slots, 2, _slots(max_blocks), block_size, buffers.rows)


def _commit_tokens(module: Any) -> None:
    state, (ints, *result) = _slots(), torch.zeros(3, 2, dtype=torch.int32)
    module.commit_tokens(ints, ints, ints.bool(), ints.long(), state.min_positions, state, torch.stack(result))


def _mask_stop_ids(module: Any, vocab_size: int) -> None:
    state, slots, logits = _slots(), torch.zeros(2).int(), torch.zeros(2, vocab_size, dtype=torch.bfloat16)
    module.mask_stop_ids(logits, slots, slots.long(), state.min_positions, state.stop_ids)


LAUNCHES = {
    **PRODUCT_LAUNCHES,
    **EXPERT_LAUNCHES,
    **LORA_LAUNCHES,
    "decode_attention": _decode,
    "prefill_attention": _prefill,
    "rms_norm": _rms_norm,
    "reduce_norm": _reduce_norm,
    "silu_mul": _silu_mul,
    "cap_logits": _cap_logits,
    "qkv_post": _qkv_post,
    "sample": _sample,
    "top_logprobs": _top_logprobs,
    "apply_marks": _apply_marks,
    "apply_token_bitmask": _apply_token_bitmask,
    "join_slots": _join_slots,
    "apply_deltas": _apply_deltas,
    "prepare_rows": _prepare_rows,
    "commit_tokens": _commit_tokens,
    "mask_stop_ids": _mask_stop_ids,
}


def compile_case(case: dict[str, Any]) -> dict[str, Any]:
    """What the compiler made of one case: resources, buffers of each multi-buffered tile, signs of what was meant."""
    parameters = case.get("parameters")  # of the op's launch; None: as found for a CPU
    with contextlib.nullcontext() if parameters is None else overriding(case["op"], parameters):
        recorder = record(case["op"], case["kernel"], case["call"], case["arch"])
    source, options = recorder.source(case.get("overrides", {}))
    options.update(case.get("options", {}))
    compiled = triton.compile(source, target=GPUTarget("cuda", case["arch"], 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        usage = subprocess.run(
            [str(CUOBJDUMP), "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
        code = [str(CUOBJDUMP), "--dump-sass", file.name]
        sass = subprocess.run(code, capture_output=True, text=True, check=True).stdout if case.get("has_sass") else ""
    numbers = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", usage))
    ptx, ttgir = compiled.asm["ptx"], compiled.asm["ttgir"]
    before_wait, wait, _ = ptx.partition("griddepcontrol.wait")
    layouts = dict(re.findall(r"(#\w+) = #ttg\.blocked<\{(.*)\}>", ttgir))
    return {
        "registers": int(numbers["REG"]),
        "stack_bytes": int(numbers["STACK"]) + int(numbers["LOCAL"]),
        "shared_bytes": compiled.metadata.shared,
        "num_buffers": [int(size) for size in re.findall(r"ttg\.local_alloc.*memdesc<(\d+)x\d+x\d+x", ttgir)],
        "prefetch_layouts": [layouts[name] for name in re.findall(r"prefetch\.L2.*?xi64, (#\w+)>", ttgir)],
        "product_layouts": [layouts[name] for name in re.findall(r"inline_asm .*mma\.sync.*xf32, (#\w+)> loc", ttgir)],
        "has_wgmma": "wgmma.mma_async" in ptx,
        "num_wgmma": sass.count("HGMMA"),
        "num_wgmma_waits": sass.count("WARPGROUP.DEPBAR"),
        "narrow_loads": len(re.findall(r"ld\.global\S*\.[bsu](?:8|16) ", ptx)),
        "has_tensor_core": any(sign in ptx for sign in ("mma.sync", "wgmma", "tcgen05.mma")),
        "has_async_copy": "cp.async" in ptx,
        "waits": bool(wait),
        "loads_before_wait": len(re.findall(r"ld\.global|cp\.async\.c", before_wait)) if wait else 0,
        "system_releases": len(re.findall(r"atom\.global\.(?:sys\.release|release\.sys)", ptx)),
        "system_acquires": len(re.findall(r"(?:ld|atom)\.global\.(?:sys\.acquire|acquire\.sys)", ptx)),
        "stores_before_wait": len(re.findall(r"st\.global|atom\.|red\.global", before_wait)) if wait else 0,
    }  # fmt: skip
