"""Run NVIDIA's perf_analyzer against our models, with inputs in the forms that genai-perf writes for it.

    python tests/peers/run_perf_analyzer.py --binary PATH

The binary is in the wheel of tritonclient up to 2.51 (`pip download --no-deps tritonclient==2.51.0`, then unzip
`*/bin/perf_analyzer`); it needs libb64 (`apt install libb64-0d`) and libcudart.so.12 (`pip install
nvidia-cuda-runtime-cu12`), found by LD_LIBRARY_PATH. A real server serves `llm` and `llm_trtllm` with tiny weights.
Exit code 0: every request of every mode was answered. It does not look at texts or token counts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.server.conftest import running_server
from tests.server.example_calls import add_examples
from tests.server.tiny_checkpoint import write_tiny_checkpoint

NUM_REQUESTS = 20
NUM_TOKENS = 16
PROMPT = "the quick brown fox"

# Mode of genai-perf -> (model, one request as its converter writes it with --output-tokens-mean and
# --output-tokens-mean-deterministic), streamed and not.
MODES: dict[str, tuple[str, dict[str, Any]]] = {
    "tensorrtllm": (
        "llm_trtllm",
        {"text_input": [PROMPT], "max_tokens": [NUM_TOKENS], "min_length": [NUM_TOKENS]},
    ),
    "vllm": (
        "llm",
        {
            "text_input": [PROMPT],
            "sampling_parameters": [json.dumps({"max_tokens": f"{NUM_TOKENS}", "min_tokens": f"{NUM_TOKENS}"})],
        },
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", type=Path, required=True, metavar="PATH", help="perf_analyzer")
    args = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory(prefix="cb_backend-peers-") as name:
        folder = Path(name)
        checkpoint = write_tiny_checkpoint(folder / "tiny")
        (folder / "models").mkdir()
        with running_server(checkpoint, folder / "models", front_ends=1, prepare=add_examples) as server:
            for mode, (model, request) in MODES.items():
                for is_stream in (True, False):
                    reason = run(args.binary, server.url, model, request, is_stream, folder)
                    results.append((f"{mode}, {'streamed' if is_stream else 'whole'}", reason))
    for title, reason in results:
        print(f"{title:<28}{reason or f'{NUM_REQUESTS} of {NUM_REQUESTS} requests answered'}")
    return 1 if any(reason for _, reason in results) else 0


def run(binary: Path, url: str, model: str, request: dict[str, Any], is_stream: bool, folder: Path) -> str:
    """Why a mode failed; empty if it did not."""
    request = {**request, "exclude_input_in_output": [True], **({"stream": [True]} if is_stream else {})}
    inputs, export = folder / "inputs.json", folder / "profile.json"
    inputs.write_text(json.dumps({"data": [request]}))
    export.unlink(missing_ok=True)
    command = [str(binary), "-m", model, "-u", url, "-i", "grpc", "--streaming", "--input-data", str(inputs)]
    command += ["--concurrency-range", "4", "--request-count", str(NUM_REQUESTS), "-s", "99"]
    command += ["--profile-export-file", str(export)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode != 0 or not export.is_file():
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        return f"perf_analyzer ended with {done.returncode}: {lines[-1] if lines else 'no output'}"
    return check(json.loads(export.read_text()), is_stream)


def check(profile: dict[str, Any], is_stream: bool) -> str:
    (experiment,) = profile["experiments"]
    requests = experiment["requests"]
    if len(requests) < NUM_REQUESTS:
        return f"only {len(requests)} of {NUM_REQUESTS} requests were measured"
    counts = [len(request["response_timestamps"]) for request in requests]
    # Half characters and coalescing make fewer responses than tokens; the empty final one may come on top.
    most = NUM_TOKENS + 1 if is_stream else 2
    if not all(1 <= count <= most for count in counts) or (is_stream and max(counts) == 1):
        return f"responses a request: {sorted(set(counts))}"
    return ""


if __name__ == "__main__":
    sys.exit(main())
