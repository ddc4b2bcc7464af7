"""A server of a command's own: one checkpoint, as `serve` would start it, on free ports, ended with the command."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from cb_backend.cli.demo_model import DEMO_MODEL, ensure_demo_model
from cb_backend.cli.paths import CliError, checkout_path
from cb_backend.cli.server.local_server import find_server
from cb_backend.cli.server.model_repository import copy_with_model
from cb_backend.cli.server.server_process import ServerOptions, ServerProcess, free_ports
from cb_backend.cli.server.start_up import wait_ready_aloud
from cb_backend.contracts.errors import ConfigError
from cb_backend.models.checkpoint import check_checkpoint_name

EXIT_S = 5  # nobody else waits for answers of it
SHOWN_LINES = 5


@contextlib.contextmanager
def own_server(checkpoint: str, say: Callable[[str], None]) -> Iterator[ServerProcess]:
    """A server that is ready, with the checkpoint as `llm`. Raises `CliError` with the reason why there is none."""
    try:
        check_checkpoint_name(checkpoint)
    except ConfigError as error:
        raise CliError(str(error)) from None
    if checkpoint == DEMO_MODEL:
        ensure_demo_model(say)
    installation = find_server()
    with tempfile.TemporaryDirectory(prefix="cb_backend-") as folder:
        # The file's length is chosen for the checkpoint that stands beside it.
        arguments = {"max_model_len": None}
        source = checkout_path("model_repository/llm")
        repository = copy_with_model(source, checkpoint, Path(folder) / "models", engine_arguments=arguments)
        http, grpc, metrics = free_ports(3)
        options = ServerOptions(repository, "127.0.0.1", http, grpc, metrics, exit_timeout_secs=EXIT_S)
        server = ServerProcess(installation, options)
        server.start()
        try:
            wait_ready_aloud(server, say)
            yield server
        except CliError:
            server.kill()  # one that waits for itself would be waited for
            raise
        finally:
            server.stop(is_draining=False)
