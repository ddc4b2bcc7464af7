"""Run the engine of Triton's OpenAI frontend, from its own files, against our models on a real server.

    PYTHONPATH=DEPS python tests/peers/run_openai_frontend.py --repo DIR

DIR is a clone (or a bare copy) of triton-inference-server/server; DEPS has what the frontend imports beside our tests'
packages (`pip install --no-deps --target DEPS openai partial_json_parser`). Its code checks OpenAI requests, makes
Triton's of them and reads the responses; `in_process_api.py` stands for the server inside its process, and for vLLM one
dataclass that it only fills in. Its HTTP layer is not run. Served with tiny weights are `llm_trtllm` (its format
"tensorrtllm") and `vllm_model`, whose config names the backend "vllm", with two adapters. Exit code 0: every text and
every usage is what our own client gets for the same prompt and parameters.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import subprocess
import sys
import tempfile
import types
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import in_process_api
from openai_cases import Case, cases, read_events
from openai_lora import add_adapters, lora_results

from cb_backend.cli.server.backend_folder import install_backend
from cb_backend.cli.server.local_server import find_server
from tests.server.conftest import RunningServer, running_server
from tests.server.example_calls import add_examples
from tests.server.tiny_checkpoint import write_tiny_checkpoint

FRONTEND = "python/openai/openai_frontend"
MODELS = {"tensorrtllm": "llm_trtllm", "vllm": "vllm_model"}
DEFAULT_MAX_TOKENS = 16
VLLM_CONFIG = 'backend: "vllm"\ninstance_group [ { count: 1 kind: KIND_MODEL } ]\n'  # all that vLLM's sample says


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repo", type=Path, required=True, metavar="DIR", help="git directory of Triton's server")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="cb_backend-peers-") as name:
        folder = Path(name)
        commit = check_out(args.repo, folder)
        sys.path.insert(0, str(folder / FRONTEND))
        in_process_api.install()
        stand_in_for_vllm()
        checkpoint = write_tiny_checkpoint(folder / "tiny")
        (folder / "models").mkdir()

        def prepare(repository: Path) -> None:
            add_examples(repository)
            leave_prompts_out(repository / "llm_trtllm" / "config.pbtxt")
            add_vllm_model(repository)
            add_adapters(repository, checkpoint, ("llm", MODELS["vllm"]))

        with running_server(checkpoint, folder / "models", front_ends=1, prepare=prepare) as server:
            results = asyncio.run(run_all(server, checkpoint, folder / "models"))
    print(f"openai_frontend {commit}, its own files")
    for title, reason in results:
        print(f"{title:<58}{reason or 'equal'}")
    num_failed = sum(bool(reason) for _, reason in results)
    print(f"{len(results) - num_failed} of {len(results)} equal to our own client's")
    return 1 if num_failed or not results else 0


def check_out(repo: Path, target: Path) -> str:
    """Write the frontend's files of the repository's HEAD below `target`; returns the commit."""
    git = ["git", "-C", str(repo)]
    archive = subprocess.run([*git, "archive", "HEAD", FRONTEND], capture_output=True, check=False)
    if archive.returncode != 0:
        sys.exit(f"error: {repo} is no git directory of Triton's server: {archive.stderr.decode().strip()}")
    subprocess.run(["tar", "-x", "-C", str(target)], input=archive.stdout, check=True)
    return subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()


def leave_prompts_out(config: Path) -> None:
    """The frontend says nothing of it in a chat, so the model must."""
    text = config.read_text()
    if '{ string_value: "false" }' not in text:
        raise RuntimeError(f"{config} has no parameter exclude_input_in_output to set")
    config.write_text(text.replace('{ string_value: "false" }', '{ string_value: "true" }'))


def add_vllm_model(repository: Path) -> None:
    """A model as a repository of vLLM's has it, with the engine's arguments of `llm`."""
    backends = find_server().backend_dir
    if not (backends / "vllm").exists():
        install_backend(backends, "vllm")
    (repository / "vllm_model" / "1").mkdir(parents=True)
    (repository / "vllm_model" / "config.pbtxt").write_text(VLLM_CONFIG)
    arguments = (repository / "llm" / "1" / "model.json").read_text()
    (repository / "vllm_model" / "1" / "model.json").write_text(arguments)


def stand_in_for_vllm() -> None:
    """vLLM's StructuredOutputsParams: the fields that `asdict` of it gives (vllm/sampling_params.py of 0.11)."""
    flags = ("disable_fallback", "disable_any_whitespace", "disable_additional_properties", "_backend_was_auto")
    texts = ("json", "regex", "choice", "grammar", "json_object", "whitespace_pattern", "structural_tag", "_backend")
    fields = [(name, Any, dataclasses.field(default=None)) for name in texts]
    fields += [(name, Any, dataclasses.field(default=False)) for name in flags]
    module: Any = types.ModuleType("vllm.sampling_params")
    module.StructuredOutputsParams = dataclasses.make_dataclass("StructuredOutputsParams", fields)
    sys.modules["vllm"] = types.ModuleType("vllm")
    sys.modules["vllm.sampling_params"] = module


async def run_all(server: RunningServer, checkpoint: Path, repository: Path) -> list[tuple[str, str]]:
    """Title and reason of failure (empty: none) of every case in both formats, streamed and whole."""
    from engine.triton_engine import TritonLLMEngine

    results = []
    for backend, model in MODELS.items():
        api = in_process_api.Server(server.url, [model], repository)
        engine = TritonLLMEngine(api, str(checkpoint), DEFAULT_MAX_TOKENS, backend=backend)
        for case in cases(server.client, engine.tokenizer, DEFAULT_MAX_TOKENS, backend):
            for is_stream in (False, True) if case.may_stream else (False,):
                title = f"{backend}, {case.title}, {'streamed' if is_stream else 'whole'}"
                try:
                    reason = case.compare(*await ask(engine, model, case, is_stream))
                except Exception as error:  # of the frontend or of the server: the case's result, whatever it is
                    reason = f"{type(error).__name__}: {error}"
                results.append((title, reason))
    results += [each async for each in lora_results(server.url, repository, str(checkpoint), server.client)]
    return results


async def ask(engine: Any, model: str, case: Case, is_stream: bool) -> tuple[str, tuple[int, int], list[str]]:
    """Text, tokens (of the prompt, of the answer) and the tokens' texts where log-probabilities are asked for."""
    from schemas.openai import CreateChatCompletionRequest, CreateCompletionRequest

    body = {**case.body, "model": model, "stream": is_stream}
    if is_stream:
        body["stream_options"] = {"include_usage": True}
    if case.is_chat:
        answer = await engine.chat(CreateChatCompletionRequest(**body))
    else:
        answer = await engine.completion(CreateCompletionRequest(**body))
    events = [event async for event in _events(answer)] if is_stream else [json.loads(answer.model_dump_json())]
    return read_events(events)


async def _events(lines: AsyncIterator[str]) -> AsyncIterator[dict[str, Any]]:
    """The chunks of a stream; the last line must be its end."""
    line = ""
    async for line in lines:
        if line != "data: [DONE]\n\n":
            yield json.loads(line.removeprefix("data: "))
    if line != "data: [DONE]\n\n":
        raise RuntimeError(f"the stream ended with {line!r} instead of [DONE]")


if __name__ == "__main__":
    sys.exit(main())
