"""Many fuzzed requests: most through the front end's parsing in process, a share at a real server.

python -m tests.fuzz.run --requests 200000 --seed 1        # a share of 0.05 at the server
python -m tests.fuzz.run --seed 1 --only 1234              # print one request and what becomes of it
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.fuzz import in_process, on_server
from tests.fuzz.mutations import make_request
from tests.server.cases.transports import Wire
from tests.server.conftest import running_server
from tests.server.tiny_checkpoint import VOCAB_SIZE, write_tiny_checkpoint


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--server-share", type=float, default=0.05, help="part of them that a real server gets")
    parser.add_argument("--only", type=int, metavar="INDEX", help="print this request, parse it, and end")
    arguments = parser.parse_args()
    if arguments.requests < 1 or not 0 <= arguments.server_share <= 1:
        parser.error("--requests must be at least 1 and --server-share between 0 and 1")
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_tiny_checkpoint(Path(folder) / "tiny")
        front_end = in_process.FrontEnd(checkpoint, VOCAB_SIZE)
        try:
            if arguments.only is not None:
                request = make_request(arguments.seed, arguments.only)
                print(in_process.shown(request))
                print("accepted" if (refusal := front_end.take(request)) is None else f"refused: {refusal}")
                return
            num_at_server = round(arguments.requests * arguments.server_share)
            num_in_process = arguments.requests - num_at_server
            began = time.monotonic()
            show("in process", in_process.fuzz(front_end, arguments.seed, 0, num_in_process), began)
        finally:
            front_end.close()
        if num_at_server:
            at_server(checkpoint, Path(folder) / "repository", arguments.seed, num_in_process, num_at_server)


def at_server(checkpoint: Path, folder: Path, seed: int, start: int, count: int) -> None:
    folder.mkdir()
    with (
        running_server(checkpoint, folder, max_model_len=in_process.MAX_MODEL_LEN) as server,
        Wire(server.process.grpc_address, server.process.http_address) as wire,
    ):
        began = time.monotonic()
        show("at the server", on_server.fuzz(server, wire, seed, start, count), began)
        server.wait_idle()


def show(where: str, counts: Counter[str], began: float) -> None:
    print(
        f"{where}, {time.monotonic() - began:.0f} s: "
        + ", ".join(f"{name} {counts[name]:,}" for name in sorted(counts))
    )


if __name__ == "__main__":
    main()
