"""`cb-backend install`: make this package a backend of a server; `server.backend_folder` says what is written."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from cb_backend.cli.server.backend_folder import BACKEND_NAME, PEER_NAME, install_backend


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--backends-dir",
        type=Path,
        required=True,
        metavar="DIR",
        help="the server's backend directory: /opt/tritonserver/backends in NVIDIA's container",
    )
    parser.add_argument(
        "--as",
        dest="name",
        default=BACKEND_NAME,
        metavar="NAME",
        help=f"its name in config.pbtxt (default: {BACKEND_NAME}; with {PEER_NAME}, vllm_backend's directories run)",
    )


def run(args: argparse.Namespace) -> int:
    door = install_backend(args.backends_dir, args.name)
    if not (args.backends_dir / "python" / "triton_python_backend_stub").is_file():
        print(
            f"warning: {args.backends_dir} has no Python backend, which the server runs this one with; "
            "install it there too (images whose tag ends in '-py3' have it)",
            file=sys.stderr,
        )
    print(f'installed {door}; a model uses it with `backend: "{args.name}"` in config.pbtxt')
    return 0
