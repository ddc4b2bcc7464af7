"""Where an engine process meets its model's rest: messages that ask for it, statistics of it, and the turn of a card.

The loop asks the desk before each step; without one, in an engine that never sleeps, it asks nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from cb_backend.contracts.config import EngineConfig
from cb_backend.contracts.errors import ConfigError, ErrorCode, GaveUpError
from cb_backend.contracts.rest import (
    AWAKE,
    LOST_FILE,
    WEIGHTS_FILE,
    CallOffOrders,
    RestAnswer,
    RestStats,
    SetRest,
    UpdateWeights,
)
from cb_backend.engine.card_turns import CardTurns
from cb_backend.engine.front_end_link import FrontEndLink
from cb_backend.engine.llm_engine import LLMEngine
from cb_backend.engine.rest import Rest
from cb_backend.support.whole_files import read_if_there, write_whole

CANNOT = "this engine cannot sleep or update: set idle_sleep_s in its model.json (0: only when it is told to)"
TELL_INTERVAL_S = 0.5
FOLDER = "cards"  # beside the runtime folders

logger = logging.getLogger("cb_backend.engine")


class KeptWeights:
    """Which weights an update has brought, for the engine that takes the place of one that died: a file beside the
    sockets of the model's engines, gone with its front ends. Empty: those of `model`."""

    def __init__(self, runtime_folder: Path) -> None:
        self._file = runtime_folder / WEIGHTS_FILE
        self._lost_file = runtime_folder / LOST_FILE
        self.folder = read_if_there(self._file)
        self.lost = read_if_there(self._lost_file)  # why those of the last update are not served; also by later engines

    def keep(self, folder: str, lost: str = "") -> None:
        self.folder, self.lost = folder, lost
        write_whole(self._lost_file, lost)
        write_whole(self._file, folder)

    def weights(self, fault_of: Callable[[Path], str]) -> Path | None:
        """The folder whose weights are to be loaded; None: the model's own. One with a fault (empty: none) is
        forgotten, so that nothing changes back unseen, and what has become of it stays to be told."""
        if not self.folder:
            return None
        folder = Path(self.folder)
        if not (fault := fault_of(folder)):
            return folder
        lost = f"the weights of {folder}, which an update had brought, cannot be loaded any more: {fault}"
        logger.error(
            "%s. Those of model.json are served instead; `cb-backend update MODEL FOLDER` brings others, "
            "`cb-backend status` shows this until then",
            lost,
        )
        self.keep("", lost)
        return None

    def how_to_start_without(self) -> str:
        return (
            f"the weights to load are those of {self.folder}, which an update had brought; to start with those of"
            f" model.json, remove {self._file}"
        )


class RestDesk:
    """Of one engine process. Called by its loop alone."""

    def __init__(
        self,
        engine: LLMEngine,
        link: FrontEndLink,
        turns: CardTurns,
        send_stats: Callable[[], None],
        kept: KeptWeights,
    ) -> None:
        """Raises `ConfigError` for a runner that cannot sleep."""
        config, sleeper = engine.config, getattr(engine.runner, "sleeper", None)
        if sleeper is None or config.idle_sleep_s is None:
            raise ConfigError(
                "idle_sleep_s is set, but the model runner of worker_cls cannot sleep; remove one of them"
            )
        self._engine = engine
        self._link = link
        self._kept = kept
        self._send_stats = send_stats
        self._next_tell = 0.0
        self.rest = Rest(
            sleeper,
            engine.scheduler,
            turns,
            engine.log,
            idle_sleep_s=config.idle_sleep_s,
            turn_s=config.turn_s,
            fail=self._fail,
            keep=kept.keep,
            tell=self._tell,
        )

    def stats(self) -> RestStats:
        return msgspec.structs.replace(self.rest.stats(), lost_update=self._kept.lost)

    def may_step(self) -> bool:
        """Do what is due; whether the engine is awake. Where it is not, this has waited a moment for messages.

        Raises `GaveUpError` with the reason where the engine cannot go on.
        """
        state = self.rest.state
        try:
            is_awake = self.rest.turn()
        except Exception as error:
            raise GaveUpError(f"while the model was {state.replace('_', ' ')}: {error}") from error
        if self.rest.state != state:
            self._send_stats()
        if not is_awake:
            self._link.wait(self.rest.poll_ms)
        return is_awake

    def _fail(self, request_ids: Sequence[int], reason: str) -> None:
        for request_id in request_ids:
            self._engine.cancel(request_id)
            self._link.send_failure(request_id, ErrorCode.UNAVAILABLE, reason)

    def _tell(self) -> None:
        """While something takes long, so that nobody takes this process for stuck."""
        if time.monotonic() >= self._next_tell:
            self._next_tell = time.monotonic() + TELL_INTERVAL_S
            self._send_stats()


@dataclass(frozen=True, slots=True)
class Asker:
    """Who is to be answered; equal for one identity."""

    link: FrontEndLink
    identity: bytes

    def __call__(self, answer: RestAnswer) -> None:
        self.link.send(self.identity, answer)


def ask(
    desk: RestDesk | None, link: FrontEndLink, identity: bytes, message: SetRest | UpdateWeights | CallOffOrders
) -> None:
    """Pass on what a front end or an observer asks for; the answer goes to its identity. Without a desk: at once."""
    answer = Asker(link, identity)
    if desk is None:
        answer(RestAnswer(AWAKE, CANNOT))
    elif isinstance(message, CallOffOrders):
        desk.rest.call_off(answer)
    elif isinstance(message, UpdateWeights):
        desk.rest.ask_update(Path(message.folder), answer, message.deadline)
    elif message.is_asleep:
        desk.rest.ask_sleep(answer, message.deadline)
    else:
        desk.rest.ask_wake(answer, message.deadline)


class Start(NamedTuple):
    """What a start needs to know of rest, before the model is loaded."""

    weights: Path | None  # folder of those to be loaded; None: the model's own
    kept: KeptWeights
    turns: CardTurns | None  # None: the model never sleeps

    def desk(self, engine: LLMEngine, link: FrontEndLink, send_stats: Callable[[], None]) -> RestDesk | None:
        """Raises `ConfigError` for a runner that cannot sleep."""
        return None if self.turns is None else RestDesk(engine, link, self.turns, send_stats, self.kept)


def begin_start(config: EngineConfig, runtime_folder: Path) -> Start:
    """For a model that sleeps: wait until its card has room for it, or nobody is left who could make any."""
    kept = KeptWeights(runtime_folder)
    if config.idle_sleep_s is None:
        return Start(None, kept, None)
    from cb_backend.engine.runner.card import card_of  # with torch
    from cb_backend.engine.runner.runner_factory import fault_of_update

    weights = kept.weights(lambda folder: fault_of_update(config, folder))
    card = card_of(config, weights)
    turns = CardTurns(runtime_folder.parent / FOLDER / card.name, card.free_bytes)
    turns.take_when_free(card.needed_bytes, logger.info)
    return Start(weights, kept, turns)
