"""Send our models what genai-perf's own converters write for `--backend tensorrtllm` and `--backend vllm`.

    PYTHONPATH=GENAI_PERF:DEPS python tests/peers/run_genai_perf.py

GENAI_PERF is the unpacked wheel (`pip download --no-deps genai-perf==0.0.16`); DEPS has what its converters import
beside our tests' packages (`pip install --target DEPS pillow pyyaml rich orjson cffi; pip install --no-deps --target
DEPS soundfile`). The converters make the payloads; tritonclient sends them to a real server with tiny weights. Not run:
genai-perf's command line and its reading of results. Exit code 0: every
answer is right: the text that our own client gets, or in the sampled mode `vllm` the length asked for.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from genai_perf.config.input.config_command import ConfigCommand
from genai_perf.inputs.converters import TensorRTLLMConverter, VLLMConverter
from genai_perf.inputs.retrievers.generic_dataset import DataRow, FileData, GenericDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.server.conftest import RunningServer, running_server
from tests.server.example_calls import Call, add_examples, joined
from tests.server.tiny_checkpoint import write_tiny_checkpoint

NUM_TOKENS = 16
PROMPTS = ("the quick brown fox", "seven wizards", "Grüße aus Köln", "def add(a, b):")
# Mode -> model, converter, --extra-inputs. top_k = 1 makes the first greedy. In the mode vllm they are tensors beside
# `sampling_parameters`, where no temperature can be said; its answers are judged by why they ended.
MODES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "tensorrtllm": ("llm_trtllm", TensorRTLLMConverter, {"top_k": 1}),
    "vllm": ("llm", VLLMConverter, {"return_finish_reason": True}),
}
INTEGERS = {"max_tokens", "min_length", "top_k"}


def main() -> int:
    results = []
    with tempfile.TemporaryDirectory(prefix="cb_backend-peers-") as name:
        checkpoint = write_tiny_checkpoint(Path(name) / "tiny")
        (Path(name) / "models").mkdir()
        with running_server(checkpoint, Path(name) / "models", front_ends=1, prepare=add_examples) as server:
            for mode in MODES:
                for is_stream in (True, False):
                    for is_deterministic in (True, False):
                        reasons = [why for why in run(server, mode, is_stream, is_deterministic) if why]
                        shape = f"{'streamed' if is_stream else 'whole'}{', deterministic' * is_deterministic}"
                        results.append((f"{mode}, {shape}", reasons))
    for title, reasons in results:
        print(f"{title:<40}{len(PROMPTS) - len(reasons)} of {len(PROMPTS)} right  {'; '.join(reasons[:2])}")
    return 1 if any(reasons for _, reasons in results) else 0


def run(server: RunningServer, mode: str, is_stream: bool, is_deterministic: bool) -> Iterator[str]:
    """Why each prompt's answer is wrong; empty for a right one."""
    model, converter, extra = MODES[mode]
    config = ConfigCommand(
        {
            "model_names": model,
            "endpoint": {"type": "kserve", "backend": mode, "streaming": is_stream},
            "input": {
                "output_tokens": {"mean": NUM_TOKENS, "stddev": 0, "deterministic": is_deterministic},
                "extra": extra,
            },
        }
    )
    rows = [DataRow(texts=[prompt]) for prompt in PROMPTS]
    payloads = converter(config).convert(GenericDataset({"prompts": FileData(rows)}))["data"]
    for prompt, payload in zip(PROMPTS, payloads, strict=True):
        responses = send(server, payload, is_batched=mode == "tensorrtllm")
        may_be_short = is_stream and not is_deterministic  # a stream that ends early may have one response, too
        if is_stream != (len(responses) > 2) and not may_be_short:
            yield f"{len(responses)} responses to {prompt!r}"
            continue
        text = joined(responses)
        if mode == "tensorrtllm":
            params = {"min_tokens": NUM_TOKENS} if is_deterministic else {}
            expected = server.client.generate(prompt, temperature=0, max_tokens=NUM_TOKENS, **params)
            yield "" if text == expected else f"{text!r} instead of {expected!r}"
        else:
            reasons = {value for response in responses for value in response.get("finish_reason", [])} - {"None"}
            is_right = reasons == {"length"} or (reasons == {"stop"} and not is_deterministic)
            yield "" if is_right and not text.startswith(prompt) else f"{text!r}, finish reasons {reasons}"


def send(server: RunningServer, payload: dict[str, Any], is_batched: bool) -> list[dict[str, list[Any]]]:
    """All responses to one payload. perf_analyzer makes tensors of its fields as the model's configuration says."""
    inputs = {name: array(name, values) for name, values in payload.items() if name != "model"}
    shape = (1, 1) if is_batched else (1,)
    return Call(server, payload["model"], shape, **inputs).all()


def array(name: str, values: list[Any]) -> Any:
    (value,) = json.loads(json.dumps(values))  # through JSON, as in genai-perf's file
    return np.array([[value]], dtype=np.int32) if name in INTEGERS else value


if __name__ == "__main__":
    sys.exit(main())
