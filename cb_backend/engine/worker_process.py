"""The process of one rank beside rank 0: it loads its shard, then runs the plans that come through the ring.

    python -m cb_backend.engine.worker_process --folder PATH --rank N --parent-pid PID --config-json JSON

It decides nothing, samples nothing and knows no requests. It ends when rank 0 does.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import socket
import sys
from pathlib import Path

from cb_backend.contracts.config import EngineConfig, engine_config_from_dict
from cb_backend.contracts.errors import CbError
from cb_backend.engine.ending import leave
from cb_backend.engine.rank_faults import leave_fault
from cb_backend.engine.workers import WorkersLostError, arrival
from cb_backend.parallel.worker_plan import decode_plan
from cb_backend.support.fault_points import reach
from cb_backend.support.process_watch import ProcessWatch

EXIT_FAILED = 1
_WAIT_S = 1.0  # for a plan, before the next look at the group; whether rank 0 lives is a thread's to watch

logger = logging.getLogger("cb_backend.worker")


def run(config: EngineConfig, folder: Path, rank: int, connection: socket.socket | None) -> None:
    """Runs until the process is ended, or raises what went wrong. connection: see `create_shard`."""
    # After the watch of rank 0 has begun: this imports torch.
    from cb_backend.engine.runner.ranks import create_shard

    arrival(folder, rank).touch()
    try:
        shard = create_shard(config, folder, rank, connection)
    except Exception as error:
        leave_fault(folder, rank, error)
        raise
    while True:
        message = shard.reader.next(_WAIT_S)
        if (fault := shard.group.fault()) is not None:
            # This rank alone may know: rank 0 gets numbers of it, or what are none, in all sums from then on.
            raise WorkersLostError(fault)
        if message is not None:
            reach("worker.execute")
            plan, forgotten = decode_plan(message)
            if forgotten and shard.adapters is not None:
                shard.adapters.forget(forgotten)
            shard.runner.execute(plan)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="cb_backend.engine.worker_process", description=__doc__)
    parser.add_argument("--folder", required=True, type=Path, help="where the ranks meet")
    parser.add_argument("--rank", required=True, type=int)
    parser.add_argument("--parent-pid", required=True, type=int, help="of rank 0: this process ends with it")
    parser.add_argument("--config-json", required=True, help="engine arguments, as in model.json")
    parser.add_argument("--connection", type=int, help="descriptor of the socket that adapters come through")
    options = parser.parse_args(arguments)
    # A group of its own, out of reach of the terminal's Ctrl-C; and if it stands still when rank 0 ends, the kernel
    # hangs up on a stopped group that has lost its parent, which ends it.
    os.setpgid(0, 0)
    name = f"rank {options.rank}"
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format=f"%(asctime)s {name} %(process)d %(levelname)s %(message)s"
    )
    ProcessWatch(options.parent_pid).call_at_end(lambda: os.kill(os.getpid(), signal.SIGKILL), "rank-0-watch")
    connection = None if options.connection is None else socket.socket(fileno=options.connection)
    try:
        run(engine_config_from_dict(json.loads(options.config_json)), options.folder, options.rank, connection)
    except Exception as error:
        is_known = isinstance(error, CbError)
        logger.error("%s cannot go on: %s", name, error, exc_info=None if is_known else error)
    return EXIT_FAILED


if __name__ == "__main__":
    leave(main())
