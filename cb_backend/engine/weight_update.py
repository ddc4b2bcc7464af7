"""Other weights in the place of a model's own, between steps: done whole, or not at all."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from cb_backend.contracts.errors import GaveUpError
from cb_backend.contracts.rest import Sleeper
from cb_backend.engine.scheduler.gate import Gate
from cb_backend.support.fault_points import reach

logger = logging.getLogger("cb_backend.engine")


class WeightUpdates:
    """Of one engine. When one is due is not known here."""

    def __init__(self, sleeper: Sleeper, gate: Gate, keep: Callable[[str], None], tell: Callable[[], None]) -> None:
        """`keep` is told the folder of the weights that are served whenever that changes."""
        self._sleeper, self._gate, self._keep, self._tell = sleeper, gate, keep, tell
        self._key = b""  # in keys of cached prefixes, of the weights that are served
        self.num_done = 0

    def do(self, folder: Path, is_filled: bool) -> str:
        """Nobody runs. What has kept the old weights in their place; empty: nothing, the new ones are served.
        `is_filled` False: there are none, the model was woken for these.

        Raises `GaveUpError` where neither are.
        """
        is_to_undo = not is_filled
        try:
            self._sleeper.check_update(folder)  # it may have changed while the order waited
            is_to_undo = True
            reach("rest.update")
            old = self._key
            self._key = self._sleeper.update(folder, self._tell)
            self._gate.change_weights(old, self._key)
        except Exception as error:
            logger.exception("weights could not be updated")
            if is_to_undo:
                self._undo(error)
            return f"the old weights are served on: {error}"
        self.num_done += 1
        self._note()
        return ""

    def _note(self) -> None:
        """For the next start of this engine."""
        try:
            self._keep(self._sleeper.weights)
        except OSError:
            logger.exception("weights were updated, but could not be noted: a restarted engine serves the old ones")

    def _undo(self, reason: Exception) -> None:
        try:
            self._sleeper.undo_update(self._tell)
        except Exception as error:
            problem = f"an update of the weights failed ({reason}), and so did its undoing: {error}"
            raise GaveUpError(problem) from error
