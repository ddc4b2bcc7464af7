"""A CUDA device that is none, so that what only a GPU's way of running does is run where there is no GPU.

Tensors on it are the CPU's, marked; events, graphs and figures of memory are stand-ins. Where a GPU is forgiving by
luck, this one is not:

- What a copy out of pinned memory reads must not change before an event says that the copy is done.
- What a copy into pinned memory brings is rubbish until then.
- A tensor of the host is not an operand beside tensors of the device.
- Whoever makes the host wait for the device is written down in `waits`, and may not do it in a capture at all. Twins
  of kernels may: they stand for what runs on the device.

It knows torch, and of the project only where a wait came from and how a step is captured.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
PACKAGE = f"{Path(__file__).resolve().parents[2] / 'cb_backend'}/"
# Calls that return a value to Python, or a tensor whose size the host must know.
_READING = {
    "item", "tolist", "cpu", "__bool__", "__int__", "__float__", "__index__", "__contains__", "nonzero", "equal",
    "allclose", "masked_select", "unique",
}  # fmt: skip


def is_on_device(value: object) -> bool:
    return isinstance(value, Tensor) and getattr(value, "fake_cuda", False)


def _is_pinned(value: object) -> bool:
    return isinstance(value, Tensor) and getattr(value, "fake_pinned", False)


def _pinned(value: Tensor) -> Tensor:
    value.fake_pinned = True  # type: ignore[attr-defined]
    return value


def _tensors_in(values: Iterable[object]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors_in(value)


def _mark(value: Any) -> Any:
    for tensor in _tensors_in((value,)):
        tensor.fake_cuda = True  # type: ignore[attr-defined]
    return value


@dataclass
class _Copy:
    """Between the device and the host's pinned memory: it may take place at any time until it is settled."""

    memory: Tensor
    content: Tensor
    is_write: bool  # into the host's memory
    site: str


@dataclass
class FakeGraph:
    """A captured step: calls that are made again."""

    calls: list[Callable[[], object]] = field(default_factory=list)
    num_replays: int = 0

    def pool(self) -> int:
        return 1

    def replay(self) -> None:
        self.num_replays += 1
        for call in self.calls:
            call()


class FakeCuda(TorchFunctionMode):
    """Active while it is entered. `mistakes` and `waits` say what a GPU would have forgiven by luck."""

    def __init__(self) -> None:
        super().__init__()
        self.mistakes: list[str] = []
        self.waits: list[str] = []  # "file:function" of what waited for the device
        self.graphs: list[FakeGraph] = []
        self.capturing: FakeGraph | None = None
        self._pending: list[_Copy] = []
        self._num_settled = 0
        self._lock = threading.RLock()  # threads that read weights are on the device as well

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "__get__":
            return self._attribute(func, args, kwargs)
        if name == "pin_memory":
            return _pinned(args[0].clone())
        if name in ("to", "copy_"):
            return self._move(name, func, args, kwargs)
        tensors = list(_tensors_in((*args, *kwargs.values())))
        if any(map(is_on_device, tensors)):
            return self._on_device(name, func, args, kwargs, tensors)
        return self._made(name, func, args, kwargs)

    # ---- calls -------------------------------------------------------------------------------------------------------

    def _attribute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        on_device = is_on_device(args[0])
        if on_device and func == Tensor.device.__get__:  # type: ignore[attr-defined]
            return CUDA
        if on_device and func == Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return True
        return _mark(func(*args, **kwargs)) if on_device else func(*args, **kwargs)

    def _made(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A new tensor, of the host's memory or the device's."""
        is_pinned = kwargs.pop("pin_memory", False)
        is_device = kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda"
        if is_device:
            kwargs["device"] = CPU
            if name in ("tensor", "as_tensor"):
                self._wait(name)
        value = func(*args, **kwargs)
        if args and _is_pinned(args[0]):
            memory = args[0].untyped_storage().data_ptr()
            for view in _tensors_in((value,)):
                if view.untyped_storage().data_ptr() == memory:
                    _pinned(view)
        return _mark(value) if is_device else _pinned(value) if is_pinned else value

    def _on_device(
        self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]
    ) -> Any:
        if name in ("numpy", "__array__"):
            raise TypeError("a tensor of the device has no memory that NumPy could see")
        strangers = [tensor for tensor in tensors if not is_on_device(tensor) and tensor.dim()]
        is_indexing = name in ("__getitem__", "__setitem__")  # there torch takes the host's over, by a copy that waits
        if strangers and not is_indexing:
            raise RuntimeError(f"{name}: tensors of the host {[tuple(t.shape) for t in strangers]} beside the device's")
        if strangers or name in _READING or (is_indexing and _is_mask_or_list(args[1])):
            self._wait(name)
        if kwargs.get("device") is not None:
            is_device = torch.device(kwargs["device"]).type == "cuda"
            value = func(*args, **{**kwargs, "device": CPU})
            return _mark(value) if is_device else value
        value = func(*args, **kwargs)
        return value if name == "cpu" else _mark(value)

    def _move(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`to` and `copy_`: the only ways between the memories."""
        if name == "copy_":
            target, source, *rest = args
            is_late = bool(rest[0] if rest else kwargs.get("non_blocking", False))
            if is_on_device(target) == is_on_device(source):
                return func(*args, **kwargs)
            return self._transfer(target, source, is_late)
        source = args[0]
        wanted = [value for value in (*args[1:], *kwargs.values()) if isinstance(value, str | torch.device)]
        if wanted and torch.device(wanted[0]).type == "meta":  # no memory at all
            return func(*args, **kwargs)
        is_device = torch.device(wanted[0]).type == "cuda" if wanted else is_on_device(source)
        if not is_device and wanted and torch.device(wanted[0]).type != "cpu":  # meta: neither memory
            return func(*args, **kwargs)
        args = (source, *(CPU if isinstance(value, str | torch.device) else value for value in args[1:]))
        kwargs = {key: CPU if key == "device" else value for key, value in kwargs.items()}
        value = func(*args, **kwargs)
        if is_device == is_on_device(source):
            return _mark(value) if is_device else value
        value = value.clone() if value is source else value
        value = _mark(value) if is_device else value
        return self._transfer(value, source, bool(kwargs.get("non_blocking", False)))

    def _transfer(self, target: Tensor, source: Tensor, is_late: bool) -> Tensor:
        """Between the memories; returns `target`. Waits unless it is one piece of pinned memory and `is_late`."""
        with torch.no_grad(), self._lock:
            host = source if is_on_device(target) else target
            is_piece = target.is_contiguous() and source.is_contiguous() and target.dtype == source.dtype
            if not (is_late and is_piece and _is_pinned(host)):
                self._wait("a copy")
                target.copy_(source)
            elif host is source:
                target.copy_(source)
                self._pending.append(_Copy(source, source.clone(), False, _site()))
            else:
                self._check_written_once(target)
                self._pending.append(_Copy(target, source.to(target.dtype, copy=True), True, _site()))
                target.fill_(float("nan") if target.is_floating_point() else torch.iinfo(target.dtype).min + 77)
        return target

    def _check_written_once(self, memory: Tensor) -> None:
        first, last = memory.data_ptr(), memory.data_ptr() + memory.nbytes
        for other in self._pending:
            start = other.memory.data_ptr()
            if other.is_write and first < start + other.memory.nbytes and start < last:
                self.mistakes.append(f"{_site()} writes what has not been read")

    # ---- time --------------------------------------------------------------------------------------------------------

    def _wait(self, what: str) -> None:
        site = _site()
        if site.startswith("kernels/"):
            return
        self.waits.append(f"{site} {what}")
        if self.capturing is not None:
            raise RuntimeError(f"{what} in a capture")
        self.settle(self.now)

    @property
    def now(self) -> int:
        """Copies that were started so far."""
        return self._num_settled + len(self._pending)

    def settle(self, until: int) -> None:
        """The device has done everything before `until`."""
        with torch.inference_mode(), self._lock:
            while self._num_settled < until:
                copy = self._pending.pop(0)
                self._num_settled += 1
                if copy.is_write:
                    copy.memory.copy_(copy.content)
                elif not torch.equal(copy.memory, copy.content):
                    self.mistakes.append(f"{copy.site} copied memory that changed before the copy was done")

    @contextlib.contextmanager
    def capture(self, graph: FakeGraph, pool: object = None, **options: object) -> Iterator[None]:
        self.capturing = graph
        self.graphs.append(graph)
        try:
            yield
        finally:
            self.capturing = None


def _is_mask_or_list(index: Any) -> bool:
    """Whether an index costs a look at the device, or a copy of the host's list."""
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, list) or (isinstance(part, Tensor) and part.dtype == torch.bool) for part in parts)


def _site() -> str:
    """The innermost place of the package, as "room/file.py:function"; "a test" if there is none."""
    frame = inspect.currentframe()
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(PACKAGE):
            return f"{name.removeprefix(PACKAGE)}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "a test"
