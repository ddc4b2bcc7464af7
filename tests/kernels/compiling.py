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

from cb_backend.kernels.launch import overriding
from tests.kernels.launches import LAUNCHES

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
    before_wait, wait, after_wait = ptx.partition("griddepcontrol.wait")
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
        "lets_next_start_before_wait": bool(wait) and "griddepcontrol.launch_dependents" in before_wait,
        "lets_next_start_after_wait": "griddepcontrol.launch_dependents" in after_wait,
        "stores_after_wait": len(re.findall(r"st\.global|atom\.|red\.global", after_wait)),
        "copies_through_l1": len(re.findall(r"cp\.async\.ca", ptx)),
        "loads_past_l1": len(re.findall(r"ld\.global\S*\.cg|cp\.async\.cg", ptx)),
        "loads_before_wait": len(re.findall(r"ld\.global|cp\.async\.c", before_wait)) if wait else 0,
        "system_releases": len(re.findall(r"atom\.global\.(?:sys\.release|release\.sys)", ptx)),
        "system_acquires": len(re.findall(r"(?:ld|atom)\.global\.(?:sys\.acquire|acquire\.sys)", ptx)),
        "stores_before_wait": len(re.findall(r"st\.global|atom\.|red\.global", before_wait)) if wait else 0,
    }  # fmt: skip
