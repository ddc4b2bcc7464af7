"""Which runner an engine runs on: one device's, several ranks', or one that the configuration names."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol

from cb_backend.contracts.config import EngineConfig
from cb_backend.contracts.errors import ConfigError
from cb_backend.contracts.messages import ModelInfo
from cb_backend.contracts.step import Runner

ONE_DEVICE = "cb_backend.engine.runner.runner_factory:create_runner"
RANKS = "cb_backend.engine.runner.ranks:create_ranked"


class RunnerFactory(Protocol):
    """What `EngineConfig.worker_cls` names: loads the model and sizes its cache.

    Of a model that can sleep it also takes a keyword `weights`, as `choose_runner` has it; nobody else is given one.
    """

    def __call__(self, config: EngineConfig) -> tuple[Runner, ModelInfo]: ...


def choose_runner(config: EngineConfig, folder: Path | None, weights: Path | None = None) -> RunnerFactory:
    """`folder`: for files of a runner in several processes, removed by others if these are killed; None: a temporary
    one. `weights`: folder of a checkpoint whose tensors are loaded in the place of the model's own. Raises
    `ConfigError` for a name that cannot be loaded."""
    is_ranked = config.tensor_parallel_size > 1
    name = config.worker_cls
    if name == "auto":
        name = RANKS if is_ranked else ONE_DEVICE
    module_name, _, attribute = name.partition(":")
    try:
        factory: Callable[..., tuple[Runner, ModelInfo]] = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"worker_cls {name!r} cannot be loaded: {error}") from error
    if is_ranked:
        return partial(factory, folder=folder)
    return factory if weights is None else partial(factory, weights=weights)
