"""Read checkpoints that quantisation packages have written themselves: compressed-tensors, AutoAWQ, GPTQModel.

    python tests/peers/run_quantisers.py [--deps DIR] [--only WRITER]

Each package is installed into its own folder below DIR (default: a temporary one) without what it depends on, but for a
few small packages; torch and transformers are those of this environment. `quantiser_files.py` then makes tiny
checkpoints with it, and the numbers that the package makes of each again. Exit code 0: our logits of the packed
checkpoint are those of the numbers, within what the package rounds them to.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.models.quantised_models import logits

FILES = Path(__file__).with_name("quantiser_files.py")
EXACT = 1e-4


@dataclass(frozen=True)
class Writer:
    """A package, what it needs beside this environment's, and which formats it is to write."""

    packages: tuple[str, ...]
    formats: tuple[str, ...]
    rounds: tuple[str, ...] = ()  # formats whose numbers it gives in bfloat16 only

    def tolerance(self, form: str) -> float:
        return 0.05 if form in self.rounds else EXACT


WRITERS = {
    "compressed-tensors": Writer(
        ("compressed-tensors", "loguru"),
        ("W4A16", "W4A16_ASYM", "W4A16 head", "W8A16", "W8A8", "NVFP4A16", "MXFP4A16", "MXFP4A16 head"),
        rounds=("NVFP4A16",),
    ),
    "autoawq": Writer(("autoawq",), ("64", "32")),
    "gptqmodel": Writer(
        ("gptqmodel", "pypcre", "logbar", "tokenicer", "defuser", "device-smi", "threadpoolctl", "datasets", "pillow"),
        ("bits=4,group=64", "bits=4,group=32,desc_act", "bits=8,group=64", "bits=8,group=32", "bits=4,group=64,head"),
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deps", type=Path, metavar="DIR", help="where the packages are, or are put")
    parser.add_argument("--only", choices=WRITERS)
    args = parser.parse_args()
    results: list[tuple[str, str]] = []
    with tempfile.TemporaryDirectory(prefix="cb_backend-peers-") as name:
        for writer in [args.only] if args.only else WRITERS:
            deps = (args.deps or Path(name) / "deps").resolve() / writer
            if reason := install(WRITERS[writer], deps):
                results.append((writer, reason))
                continue
            for index, form in enumerate(WRITERS[writer].formats):
                folder = Path(name) / f"{writer}-{index}"
                folder.mkdir()
                results.append((f"{writer} {form}", compare(writer, form, deps, folder)))
                print(f"{results[-1][0]:<45}{results[-1][1] or 'equal'}", flush=True)
    num_failed = sum(bool(reason) for _, reason in results)
    print(f"{len(results) - num_failed} of {len(results)} checkpoints read as their writers meant them")
    for title, reason in results:
        if reason:
            print(f"failed: {title}: {reason}")
    return 1 if num_failed or not results else 0


def install(writer: Writer, deps: Path) -> str:
    """Why it could not be installed; empty where it was, or is there already."""
    if deps.is_dir():
        return ""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(deps), *writer.packages]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else f"cannot be installed: {last_line(done.stderr)}"


def compare(writer: str, form: str, deps: Path, folder: Path) -> str:
    """Have it written, and read it; the reason of a failure, or an empty text."""
    environment = {**os.environ, "PYTHONPATH": str(deps), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(FILES), writer, form, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode != 0:
        return f"its files cannot be made: {last_line(done.stderr)}"
    found, wanted = logits(folder / "quantised"), logits(folder / "plain")
    error = float((found - wanted).abs().max() / wanted.std())
    if not bool(torch.isfinite(found).all()) or error > WRITERS[writer].tolerance(form):
        return f"logits differ by {error:.2g} of their spread"
    return ""


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[-1]


if __name__ == "__main__":
    sys.exit(main())
