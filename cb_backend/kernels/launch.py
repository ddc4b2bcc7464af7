"""What the kernels' launchers share: where Triton is, whether it can run here, and the launch parameters of this GPU.

Launch parameters are data: `tuned/<gpu>.json` (or a near relative's), then `tuned/default.json`; `kernels/tune.py`
writes the first kind.
Nothing is tuned while serving. This module does not know what any kernel computes.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cb_backend.kernels.row_sampling import ROW_PARAMETERS

try:
    import triton
    import triton.language as tl
except ImportError:  # a machine without Triton runs the twins
    triton = tl = None

# Triton's interpreter runs kernels on CPU tensors. It reads this when it is imported, so later changes have no effect.
IS_INTERPRETING = triton is not None and os.environ.get("TRITON_INTERPRET") == "1"

MAX_DEPENDENT_ROWS = 128  # of a step whose kernels are dependent launches, as far as that is a kernel's own choice
TUNED = Path(__file__).parent / "tuned"
# Whose file a GPU without one of its own uses, by compute capability.
_RELATIVES = {(9, 0): "nvidia-h100-80gb-hbm3.json"}


# One value a row is read at a time through these, so alignment gains nothing; and as parts of larger arrays they may
# point anywhere, which must not compile another variant while serving.
_ROW_POINTERS = frozenset(
    f"{name}_ptr"
    for name in (
        "slots", "seq_lens", "query_start_loc", "cos_sin_rows", "slot_mapping",
        "positions", "token_ids", "is_failed", "rows", "mark_rows", *ROW_PARAMETERS,
    )
)  # fmt: skip


def jit(*do_not_specialize: str) -> Callable[[Callable[..., Any]], Any]:
    """`triton.jit`, or the bare function where Triton is missing: modules import everywhere.

    The named integers change from step to step; a variant compiled for each of their kinds would come late.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        if triton is None:
            return function
        unaligned = [name for name in function.__code__.co_varnames if name in _ROW_POINTERS]
        return triton.jit(function, do_not_specialize=do_not_specialize, do_not_specialize_on_alignment=unaligned)

    return decorate


def needs_twin(tensor: Tensor) -> bool:
    """Whether the kernels cannot run on this tensor's device: no Triton, or a CPU outside the interpreter."""
    return triton is None or not (tensor.is_cuda or IS_INTERPRETING)


def next_power_of_2(value: int) -> int:
    return 1 << max(value - 1, 0).bit_length()


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; 4 stands for the interpreter's CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@functools.cache
def can_overlap(device: torch.device) -> bool:
    """Whether kernels of a step are dependent launches: each may start while the one before still runs.

    What holds such a chain together: every kernel of it waits (`await_previous`) before it writes anything or reads
    what the chain writes, so a kernel that has waited knows all earlier ones to be complete. Weights may be read at
    once, and so may what was there before a step's first layer: the embedding is a plain launch, which waits for all
    before it. One kernel waits last instead of first, and the one before it sees to that (`linear_shrink`).
    `CB_BACKEND_DEPENDENT_LAUNCHES=0` in the environment makes every launch a plain one; results are the same, bit for
    bit.
    """
    if device.type != "cuda" or os.environ.get("CB_BACKEND_DEPENDENT_LAUNCHES") == "0":
        return False
    return torch.cuda.get_device_capability(device)[0] >= 9


@functools.cache
def dependent_options(device: torch.device, num_rows: int = 1) -> dict[str, bool]:
    """Launch options of a kernel that calls `await_previous`.

    With many rows a kernel is too long for its start to be felt, and programs that wait are in the way of those that
    work: there all but the products are launched the plain way, which the waits allow.
    """
    return {"launch_pdl": True} if can_overlap(device) and num_rows <= MAX_DEPENDENT_ROWS else {}


@jit()
def await_previous(IS_DEPENDENT: tl.constexpr):
    """Wait until the kernel before is complete and its results can be read."""
    if IS_DEPENDENT:
        tl.extra.cuda.gdc_wait()


@jit()
def let_next_start(IS_DEPENDENT: tl.constexpr):
    """Let the next kernel start once every program of this one has come here."""
    if IS_DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()


@functools.cache
def max_shared_bytes(device: torch.device) -> int:
    """Shared memory one program may have; without bound on the interpreter's CPU."""
    if device.type != "cuda":
        return 1 << 30
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 99 << 10))


_overrides: list[tuple[str, dict[str, int], dict[str, int]]] = []  # op, conditions, parameters; the last goes first


@contextlib.contextmanager
def overriding(op: str, parameters: dict[str, int], **when: int) -> Iterator[None]:
    """Launch `op` with these parameters meanwhile, wherever `when` agrees with its conditions: how the tuners try them.

    To be left in the opposite order of entering, as `with` and `ExitStack` do.
    """
    _overrides.append((op, when, parameters))
    try:
        yield
    finally:
        _overrides.pop()


def launch_parameters(op: str, device: torch.device, **conditions: int) -> dict[str, int]:
    """The launch parameters of `op`, from the first entry whose `when` agrees with `conditions`.

    A file maps an op to a list of {"when": {condition: value}, "shared_bytes": n, "use": {parameter: value}}; an entry
    that needs more shared memory than a program may have here is passed over, and its "by" is the tuners' own note. The
    GPU's own file, or else that of a GPU of the same compute capability, goes before the default. Raises `KeyError` for
    an op that no file knows.
    """
    if _overrides:
        for its_op, when, parameters in reversed(_overrides):
            if its_op == op and when.items() <= conditions.items():
                return parameters
    return _tuned_parameters(op, device, **conditions)


_products: set[tuple[str, tuple[tuple[str, int], ...]]] = set()  # (op, shape) that a GPU has launched
_SHAPE = ("n", "k", "e", "bits")  # conditions of a product that follow from the model alone


def products_on_defaults(device: torch.device) -> list[str]:
    """Products that have been looked up and of whose shape this GPU's file has no entry for any number of rows."""
    if device.type != "cuda" or not _products:
        return []
    own = _read(tuned_files(device)[0])
    return sorted(
        " ".join([op, *(f"{name}={value}" for name, value in shape)])
        for op, shape in _products
        if not any(entry.get("when", {}).items() >= dict(shape).items() for entry in own.get(op, []))
    )


@functools.cache
def _tuned_parameters(op: str, device: torch.device, **conditions: int) -> dict[str, int]:
    if device.type == "cuda" and {"n", "k"} <= conditions.keys():
        _products.add((op, tuple((name, conditions[name]) for name in _SHAPE if name in conditions)))
    entries = [entry for name in tuned_files(device) for entry in _read(name).get(op, [])]
    for entry in entries:
        if entry.get("shared_bytes", 0) > max_shared_bytes(device):
            continue
        if all(conditions.get(name) == value for name, value in entry.get("when", {}).items()):
            use: dict[str, int] = entry["use"]
            return use
    raise KeyError(f"no launch parameters for {op} with {conditions} in {TUNED.name}/default.json")


def gpu_slug(device: torch.device) -> str:
    """The GPU's name as a file name: `nvidia-h100-80gb-hbm3`."""
    return re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(device).lower()).strip("-")


def tuned_files(device: torch.device) -> tuple[str, ...]:
    """The files to look into, first one first."""
    if device.type != "cuda":
        return ("default.json",)
    own = f"{gpu_slug(device)}.json"
    if not (TUNED / own).is_file():
        own = _RELATIVES.get(torch.cuda.get_device_capability(device), own)
    return own, "default.json"


@functools.cache
def _read(name: str) -> dict[str, Any]:
    path = TUNED / name
    parsed: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return parsed
