"""A runner that sleeps: the memory of its weights and cache goes, and comes back to the same addresses.

Weights, the model's other tensors (adapters' slots, angles of ropes) and the cache lie in a range each; whatever else a
runner has stays where it is: its graphs, its state by slot, its buffers. Weights come back from a copy in host memory,
or out of their files; the other tensors always from a copy; the cache comes back empty.
When to sleep is not known here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from cb_backend.contracts.config import EngineConfig
from cb_backend.contracts.errors import ConfigError
from cb_backend.contracts.rest import WeightsGoneError
from cb_backend.engine.runner.cuda_range import CudaRange, driver
from cb_backend.engine.runner.host_copy import HostCopy
from cb_backend.engine.runner.memory_range import HostRange, MemoryRange, aligned, no_room
from cb_backend.engine.runner.model_tensors import Places, move, storage_bytes, tensors_of
from cb_backend.engine.runner.slot_runner import SlotRunner
from cb_backend.kv_cache.storage import free_memory
from cb_backend.models.decoder import DecoderForCausalLM
from cb_backend.models.replacement import ModelWeights, Stamps, weights_key

SETTLE_EVERY = 16  # pieces that are read: so much of what layers make anew is there twice, at most


class RunnerSleeper:
    """Implements `contracts.rest.Sleeper`. Made before the model is loaded, complete with `attach`."""

    def __init__(self, config: EngineConfig, device: torch.device, log: Callable[[str], None]) -> None:
        """Raises `ConfigError` where the device needs a package that is not there."""
        self._device = device
        self._log = log
        if device.type == "cuda":
            driver()
        is_from_files = config.sleep_weights == "files" or (config.sleep_weights == "auto" and device.type == "cpu")
        self._keeps_copy = not is_from_files
        self._ranges: dict[str, MemoryRange] = {}
        self._copies: dict[str, HostCopy] = {}
        self._done: torch.cuda.Event | None = None  # of the last wake
        self.weights = ""

    # ---- while the runner is made ---------------------------------------------------------------------------------

    def take_model(self, model: DecoderForCausalLM) -> None:
        """Move a loaded model's tensors into ranges: those that its files fill, and the others."""
        others = {_address(tensor) for _, tensor in tensors_of((model.ropes, model.adapters), self._device)}
        found = tensors_of(model, self._device)
        for name, is_other in (("weights", False), ("others", True)):
            own = [each for each in found if (_address(each[1]) in others) is is_other]
            if own:
                self._ranges[name] = self._new_range(storage_bytes(own))
                move(own, self._ranges[name])
                if is_other or self._keeps_copy:
                    self._copies[name] = HostCopy(self._ranges[name])

    def new_cache(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes] of zeros, for the cache."""
        self._ranges["cache"] = self._new_range(num_bytes)
        cache = self._ranges["cache"].place(num_bytes)
        return cache.zero_() if self._device.type == "cuda" else cache  # the host's pages come as zeros

    def attach(self, runner: SlotRunner, weights: ModelWeights, folder: Path, stamps: Stamps) -> None:
        """`folder`: what the model is filled from; `stamps`: of its files, from before they were read."""
        self._runner = runner
        self._weights = weights
        self._loaded = folder, stamps
        self._serves(folder, stamps)
        runner.sleeper = self

    def _serves(self, folder: Path, stamps: Stamps) -> None:
        self._folder, self._stamps = folder, stamps
        self.weights = "" if self._weights.is_own(folder) else str(folder)

    def _new_range(self, num_bytes: int) -> MemoryRange:
        if self._device.type == "cuda":
            return CudaRange(aligned(num_bytes), self._device)
        return HostRange(num_bytes)

    # ---- sleep and wake -------------------------------------------------------------------------------------------

    @property
    def held_bytes(self) -> int:
        return sum(each.held_bytes for each in self._ranges.values())

    @property
    def needed_bytes(self) -> int:
        return sum(each.full_bytes for each in self._ranges.values())

    def prepare(self) -> bool:
        for name, copy in list(self._copies.items()):
            try:
                if not copy.prepare():
                    return False
            except MemoryError as error:
                if name != "weights":
                    raise
                self._log(f"asleep, the weights are not kept in host memory but read again: {error}")
                copy.forget()
                del self._copies[name]
        return True

    def sleep(self, tell: Callable[[], None] = lambda: None) -> None:
        self._finish()
        self._keep_what_is_gone(tell)
        for name, copy in self._copies.items():
            if name == "others" or not copy.is_current:
                copy.save()
        for held in self._ranges.values():
            held.give_up()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # what steps have left

    def _keep_what_is_gone(self, tell: Callable[[], None]) -> None:
        """Weights that could not be read again are kept in host memory after all, if that has room for them."""
        try:
            self.check_wake()
        except WeightsGoneError as gone:
            copy = HostCopy(self._ranges["weights"])
            try:
                while not copy.prepare():
                    tell()
            except MemoryError as error:
                self._log(f"{gone}. They cannot be kept in host memory either: {error}")
                return
            self._copies["weights"] = copy
            self._log(f"the files in {self._folder} are not those of the weights any more, so host memory keeps these")

    def check_wake(self) -> None:
        if "weights" in self._copies:
            return
        try:
            self._weights.check_unchanged(self._folder, self._stamps)
        except ConfigError as error:
            raise self._gone(error) from None

    @torch.inference_mode()
    def wake(self, tell: Callable[[], None], is_filled: bool = True) -> None:
        if is_filled:
            self.check_wake()
        if free_memory(self._device)[0] < self.needed_bytes:  # nothing is copied in vain
            raise no_room(self.needed_bytes, self._device)
        try:
            for name, held in self._ranges.items():
                held.take_back()
                if name in self._copies and (is_filled or name != "weights"):
                    self._copies[name].restore()  # goes on while the cache, much larger, is had
            if self._device.type == "cuda":
                self._clear_cache()
            if is_filled and "weights" not in self._copies:
                self._fill_again(tell)
        except Exception:
            self._finish()
            for held in self._ranges.values():
                held.give_up()
            raise
        if self._device.type == "cuda":
            self._done = torch.cuda.current_stream().record_event()

    def _fill_again(self, tell: Callable[[], None]) -> None:
        """With what is served. Raises `WeightsGoneError` where that is not there any more."""
        try:
            self._fill(self._folder, tell, self._stamps)
        except ConfigError as error:
            if self._makes_new:  # some of it may be in use, elsewhere than in the ranges
                raise
            raise self._gone(error) from None

    def _gone(self, error: ConfigError) -> WeightsGoneError:
        return WeightsGoneError(
            f"the model cannot wake: its weights were to be read again from {self._folder}, but {error}. Put the files "
            "back as they were, have the model take what is there now (cb-backend update MODEL FOLDER), or set "
            "sleep_weights to host"
        )

    def _clear_cache(self) -> None:
        """Beside the copies of the weights: what memory holds that was another's is not always a number."""
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            self._ranges["cache"].data.zero_()
        torch.cuda.current_stream().wait_stream(stream)

    @property
    def is_awake(self) -> bool:
        return self._done is None or self._done.query()

    def _finish(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    # ---- other weights --------------------------------------------------------------------------------------------

    def check_update(self, folder: Path) -> None:
        self._weights.check(folder)

    def update(self, folder: Path, tell: Callable[[], None]) -> bytes:
        self._finish()
        self._serves(folder, self._fill(folder, tell))
        if "weights" in self._copies:
            self._copies["weights"].is_current = False
        key = b"" if (folder, self._stamps) == self._loaded else weights_key(folder, self._stamps)
        self._runner.weights_key = key
        return key

    def undo_update(self, tell: Callable[[], None]) -> None:
        """Raises `RuntimeError` where layers make tensors or numbers of what is read: some of the new ones may be in
        use, which no copy of the memory takes back. Raises `ConfigError` where the old files are not there any more.
        """
        if self._makes_new:
            raise RuntimeError(
                "its layers make what they use of the files' tensors; the engine starts again with the old"
            )
        copy = self._copies.get("weights")
        if copy is not None and copy.is_current:
            copy.restore()
            self._finish()
            return
        self._fill(self._folder, tell, self._stamps)

    @property
    def _makes_new(self) -> bool:
        """Whether layers make tensors or numbers of what is read, rather than have it copied where theirs are."""
        return any(not isinstance(placement.target, Tensor) for placement in self._weights.model.placements())

    @torch.inference_mode()
    def _fill(self, folder: Path, tell: Callable[[], None], since: Stamps | None = None) -> Stamps:
        """Put a folder's weights where the model's are, whatever else its layers make of them; as `ModelWeights.fill`
        has it."""
        places, num_pieces = Places(self._weights.model, self._device), 0
        makes_new = self._makes_new

        def progress() -> None:
            nonlocal num_pieces
            num_pieces += 1
            if makes_new and num_pieces % SETTLE_EVERY == 0:
                places.settle(is_end=False)
            tell()

        stamps = self._weights.fill(folder, progress, since)
        places.settle(is_end=True)
        if places.has_other_values and self._runner.graphs.shapes:
            self._capture_again()
        return stamps

    def _capture_again(self) -> None:
        """What launches know by value has changed, as a scale of a whole matrix."""
        runner, shapes = self._runner, self._runner.graphs.shapes
        runner.graphs.clear()
        runner.capture(shapes, self._log)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
