"""The engine process: it loads the model, and runs the loop of `engine_loop` until the end.

    python -m cb_backend.engine.engine_process --socket PATH --server-pid PID --config-json JSON

Exit codes: 0 nothing more to do, 1 the start failed, 2 the start failed for a reason that the user can mend
(`ConfigError`), 3 the engine gave up while serving.
"""

from __future__ import annotations

import argparse
import json
import logging
import signal
import sys
import time
from pathlib import Path

from cb_backend.contracts.config import EngineConfig, engine_config_from_dict
from cb_backend.contracts.errors import ConfigError
from cb_backend.engine.ending import ServerEnding, leave
from cb_backend.engine.engine_loop import EXIT_CONFIG_ERROR, EXIT_START_FAILED, EngineProcess
from cb_backend.engine.front_end_link import FrontEndLink, report_failed_start
from cb_backend.engine.llm_engine import create_engine
from cb_backend.engine.rest_desk import Start, begin_start
from cb_backend.support.collection import no_collection

logger = logging.getLogger("cb_backend.engine")


def serve(config: EngineConfig, socket_path: str, server_pid: int) -> int:
    """Load the model, then run the loop until the end. Returns the exit code."""
    link = FrontEndLink(socket_path, server_pid)
    start: Start | None = None
    try:
        begin = time.monotonic()
        start = begin_start(config, Path(socket_path).parent)
        # A million objects come to stay: looking through them again and again takes longer than their garbage is worth.
        with no_collection():
            engine = create_engine(config, Path(socket_path).parent, start.weights)
        process = EngineProcess(engine, link)
        process.desk = start.desk(engine, link, process.send_stats)
    except Exception as error:
        if start is not None and start.weights is not None:
            logger.error("%s", start.kept.how_to_start_without())
        report_failed_start(link, error)
        link.close()
        return EXIT_CONFIG_ERROR if isinstance(error, ConfigError) else EXIT_START_FAILED
    logger.info("ready after %.1f s: %s", time.monotonic() - begin, engine.info)
    signal.signal(signal.SIGTERM, lambda _number, _frame: setattr(process, "is_stopping", True))
    try:
        return process.run()
    finally:
        engine.close()
        link.close()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="cb_backend.engine.engine_process", description=__doc__)
    parser.add_argument("--socket", required=True, help="path of the socket that front ends connect to")
    parser.add_argument("--server-pid", type=int, required=True, help="the engine ends with this process")
    parser.add_argument("--config-json", required=True, help="engine arguments, as in model.json")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the server decides
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s engine %(process)d %(levelname)s %(message)s"
    )
    ending = ServerEnding(options.server_pid, Path(options.socket).parent)
    exit_code = serve(engine_config_from_dict(json.loads(options.config_json)), options.socket, options.server_pid)
    ending.wait_if_begun()
    return exit_code


if __name__ == "__main__":
    leave(main())
