"""Run the tests of Triton's OpenAI frontend, from its own files, against the gateway in front of a real server.

    PYTHONPATH=DEPS python tests/peers/run_openai_tests.py --repo DIR [--only WORD]

DIR is a clone (or a bare copy) of triton-inference-server/server; DEPS has what its tests import beside our tests'
packages (`pip install --no-deps --target DEPS pytest-asyncio`). Its test files run as they are; the fixtures that
start a frontend inside the process are replaced by ones that give the gateway's address. Served is SmolLM2-135M.
Exit code 0: whatever fails has its reason below, in the frontend's own shapes of errors or in the model.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from cb_backend.cli.demo_model import ensure_demo_model
from tests.gateway.conftest import running_gateway
from tests.server.conftest import running_server

TESTS = "python/openai/tests"
FILES = ("test_chat_completions.py", "test_completions.py", "test_openai_client.py", "test_tool_calling.py")
MODEL = "llm"
MAX_MODEL_LEN = 512
TIMEOUT_S = 1800.0

# What the files import of the frontend's process, and fixtures with an address instead of it.
STAND_INS = {
    "tritonserver.py": "Server = ModelControlMode = object\n",
    "fastapi/__init__.py": "",
    "fastapi/testclient.py": "from httpx import Client as TestClient\n",
    "tests/__init__.py": "",
    "tests/utils.py": """import pytest


def setup_server(*args, **options):
    pytest.skip("starts a frontend inside the process")


setup_fastapi_app = OpenAIServer = setup_server
""",
    "tests/conftest.py": """import os
import httpx
import openai
import pytest

ADDRESS = os.environ["GATEWAY"]


class Address:
    def get_client(self):
        return openai.OpenAI(base_url=ADDRESS + "/v1", api_key="none", max_retries=0, timeout=300)

    def get_async_client(self):
        return openai.AsyncOpenAI(base_url=ADDRESS + "/v1", api_key="none", max_retries=0, timeout=300)


@pytest.fixture(scope="session")
def server():
    return Address()


@pytest.fixture(scope="class")
def fastapi_client_class_scope():
    with httpx.Client(base_url=ADDRESS, timeout=300) as client:
        yield client


@pytest.fixture(scope="session")
def backend():
    return "vllm"


@pytest.fixture(scope="session")
def model():
    return os.environ["MODEL"]


@pytest.fixture(scope="session")
def tokenizer_model():
    return ""


@pytest.fixture(scope="session")
def model_repository():
    return ""


@pytest.fixture(scope="session")
def prompt():
    return "What is machine learning?"


@pytest.fixture(scope="session")
def messages(prompt):
    return [{"role": "user", "content": prompt}]
""",
}

SHAPE = "wants the frontend's 422, its 'detail' or its words; ours is OpenAI's own: 400 and 'error'"
MORE = "wants it refused, or left out; the gateway does it"
BITS = "wants log-probabilities equal to the last bit, with and without a cached prompt"
WORDS = "wants an answer that this model does not give"
NONE = "wants it refused; 'top_logprobs': 0 asks for nothing, and vLLM and the gateway answer as if it were left out"
REFUSED = "422|400|detail|Unprocessable"
# A word of the test's name, what its failure says, why that is so here.
EXCUSED = (
    ("top_logprobs_without_logprobs[0", "200 == ", NONE),
    ("top_logprobs_requires_logprobs[0", "DID NOT RAISE", NONE),
    ("_invalid_sampling_parameters", REFUSED, SHAPE),
    ("_message", REFUSED, SHAPE),
    ("top_logprobs", REFUSED, SHAPE),
    ("_empty_request", REFUSED, SHAPE),
    ("_no_model", REFUSED, SHAPE),
    ("_no_prompt", REFUSED, SHAPE),
    ("_empty_prompt", REFUSED, SHAPE),
    ("logprobs_validation", REFUSED, SHAPE),
    ("logprobs_exceeds_max", REFUSED, SHAPE),
    ("test_stream_options_without_streaming", REFUSED, SHAPE),
    ("completions_multiple_choices", "200 == 400", MORE),
    ("completions_multiple_choices", "detail", SHAPE),  # best_of: refused as they want it
    ("sampling_parameters[logit_bias", "200 == 400", MORE),
    ("test_completions_logprobs_zero", "is None", MORE),
    ("test_openai_client_completion", "'length' == 'stop'", "its limit ends the answer, and the gateway says so"),
    ("completion_logprobs", "should match", BITS),
    ("test_completions_sampling_parameters", "assert ''", WORDS),  # it draws an empty one now and then
    ("test_completions_max_tokens", "0 == 1", WORDS),  # its first token is a line's end
    ("test_tool_call_and_choice", "chat template does not use 'tools'", WORDS),
    ("test_tool_call_with_reply", "chat template does not use 'tools'", WORDS),
    ("test_tool_call_with", "'tool_calls' != 'tool_calls'", "wants 'stop' of a call that was forced"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repo", type=Path, required=True, metavar="DIR", help="git directory of Triton's server")
    parser.add_argument("--only", default="", metavar="WORD", help="tests whose name has this word")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="cb_backend-peers-") as name:
        folder = Path(name)
        commit = check_out(args.repo, folder / "checkout")
        (folder / "models").mkdir()
        model = ensure_demo_model(print)
        arguments = {"max_model_len": MAX_MODEL_LEN, "kv_cache_memory_bytes": 256 << 20}
        with (
            running_server(model, folder / "models", front_ends=1, **arguments) as server,
            running_gateway(server.url) as address,
        ):
            outcomes = run_tests(folder, address, args.only)
    return show(outcomes, commit)


def check_out(repo: Path, target: Path) -> str:
    """The test files of the repository's HEAD, and stand-ins beside them; returns the commit."""
    git = ["git", "-C", str(repo)]
    target.mkdir()
    files = [f"{TESTS}/{file}" for file in FILES]
    archive = subprocess.run([*git, "archive", "HEAD", *files], capture_output=True, check=False)
    if archive.returncode != 0:
        sys.exit(f"error: {repo} is no git directory of Triton's server: {archive.stderr.decode().strip()}")
    subprocess.run(["tar", "-x", "-C", str(target), "--strip-components=2"], input=archive.stdout, check=True)
    for name, text in STAND_INS.items():
        file = target / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    return subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()


def run_tests(folder: Path, address: str, only: str) -> dict[str, str]:
    """Outcomes by test: "" for a pass, "skipped: ..." or why not."""
    checkout, report = folder / "checkout", folder / "report.xml"
    words = [sys.executable, "-m", "pytest", "-q", "--rootdir", str(checkout), "-c", os.devnull, "tests"]
    words += [
        "-p",
        "no:cacheprovider",
        "-o",
        "asyncio_default_test_loop_scope=session",
        "--junitxml",
        str(report),
        *(["-k", only] if only else []),
    ]
    path = os.pathsep.join(filter(None, (str(checkout), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "GATEWAY": address, "MODEL": MODEL}
    done = subprocess.run(
        words, cwd=checkout, env=environment, timeout=TIMEOUT_S, capture_output=True, text=True, check=False
    )
    if not report.is_file():
        sys.exit(f"error: the tests did not run:\n{done.stdout}{done.stderr}")
    outcomes = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}"
        failed, skipped = case.find("failure"), case.find("skipped")
        failed = case.find("error") if failed is None else failed
        if failed is not None:
            outcomes[name] = (failed.get("message") or "failed").splitlines()[0]
        else:
            outcomes[name] = "" if skipped is None else f"skipped: {skipped.get('message')}"
    return outcomes


def show(outcomes: dict[str, str], commit: str) -> int:
    num_passed = num_excused = num_skipped = num_wrong = 0
    print(f"{TESTS} {commit}, its own files")
    for name, outcome in outcomes.items():
        num_passed += not outcome
        num_skipped += outcome.startswith("skipped")
        if outcome and not outcome.startswith("skipped"):
            excuse = next((why for word, says, why in EXCUSED if word in name and re.search(says, outcome)), "")
            num_excused += bool(excuse)
            num_wrong += not excuse
            print(f"{'excused' if excuse else 'FAILED '} {name}: {excuse or outcome}")
    print(f"{num_passed} pass, {num_excused} are excused, {num_skipped} are skipped, {num_wrong} fail")
    return 1 if num_wrong or not num_passed else 0


if __name__ == "__main__":
    sys.exit(main())
