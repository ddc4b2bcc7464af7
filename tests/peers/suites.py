"""Which files of vllm_backend's test suite are run, on which models, and which tests cannot pass here and why.

The models are those that the suites' own shell scripts prepare: copies of `samples/model_repository/vllm_model`, whose
config.pbtxt stays as it is and whose model.json gets the stand-in weights (and adapters, for theirs of gemma-2b).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

STREAMING = ("--streaming-mode", "--exclude-inputs-in-outputs")  # the peer, too, refuses the first without the second
LOG_TEXT = "looks for vLLM's own lines in the server's log; everything it asks of the wire is checked before"

ADD_SUB_CONFIG = """backend: "python"
input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ 4 ] }, { name: "INPUT1" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 4 ] }, { name: "OUTPUT1" data_type: TYPE_FP32 dims: [ 4 ] } ]
instance_group [ { kind: KIND_CPU } ]
"""
ADD_SUB_MODEL = '''"""Sum and difference: the small other model that the suite loads beside the language model."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.respond(request) for request in requests]

    def respond(self, request):
        a, b = (pb_utils.get_input_tensor_by_name(request, f"INPUT{i}").as_numpy() for i in range(2))
        tensors = [pb_utils.Tensor("OUTPUT0", a + b), pb_utils.Tensor("OUTPUT1", a - b)]
        return pb_utils.InferenceResponse(tensors)
'''


@dataclass(frozen=True)
class Models:
    """Where the suite lies, and what its models are to serve."""

    checkout: Path  # of vllm_backend
    checkpoint: Path
    repository: Path  # to be filled
    adapted: Callable[[], tuple[Path, dict[str, Path]]]  # a checkpoint and its adapters' folders by name
    embedding: Callable[[], Path]  # another checkpoint, that only embeds

    def add(self, name: str, arguments: dict[str, object] | None = None, config: str = "") -> None:
        """A copy of the sample model; `arguments` replace or add to its model.json, `config` is added to its config."""
        target = self.repository / name
        shutil.copytree(self.checkout / "samples" / "model_repository" / "vllm_model", target)
        file = target / "1" / "model.json"
        values = {**json.loads(file.read_text()), "model": str(self.checkpoint), "kv_cache_memory_bytes": 16 << 20}
        file.write_text(json.dumps({**values, **(arguments or {})}))
        with (target / "config.pbtxt").open("a") as out:
            out.write(config)

    def rename_argument(self, name: str, old: str, new: str) -> None:
        file = self.repository / name / "1" / "model.json"
        file.write_text(file.read_text().replace(f'"{old}"', f'"{new}"'))


@dataclass(frozen=True)
class Suite:
    """One file, with the models and the server it wants."""

    title: str
    file: str  # in the checkout
    prepare: Callable[[Models], None]
    runner: str = "unittest"  # unittest | pytest | script
    tests: tuple[str, ...] = ()  # names to run; none: all
    arguments: tuple[str, ...] = ()  # of a script
    server_arguments: tuple[str, ...] = ()
    log_name: str = "server.log"  # what the server's output is called, in the suite's folder
    environment: dict[str, str] = field(default_factory=dict)  # of the file
    is_newer: bool = False  # not every commit of vllm_backend has it
    excused: dict[str, str] = field(default_factory=dict)  # test: why it cannot pass without other weights or vLLM


def one_model(models: Models) -> None:
    models.add("vllm_opt")


def sample_model(models: Models) -> None:
    models.add("vllm_model")


def lora_model(enable_lora: bool | str) -> Callable[[Models], None]:
    """What `ci/L0_multi_gpu_vllm/multi_lora/test.sh` lays out, for one device."""

    def prepare(models: Models) -> None:
        checkpoint, adapters = models.adapted()
        is_on = str(enable_lora).lower() == "true"
        rank = {"max_lora_rank": 32} if is_on else {}
        models.add("vllm_llama_multi_lora", {"model": str(checkpoint), "enable_lora": enable_lora, **rank})
        if is_on:
            listed = json.dumps({name: str(adapters[name]) for name in ("doll", "sheep")})
            (models.repository / "vllm_llama_multi_lora" / "1" / "multi_lora.json").write_text(listed)

    return prepare


def lora_suite(title: str, enable_lora: bool | str) -> Suite:
    file = "ci/L0_multi_gpu_vllm/multi_lora/multi_lora_test.py"
    environment = {"SERVER_ENABLE_LORA": str(enable_lora).lower()}
    return Suite(f"multi_lora: {title}", file, lora_model(enable_lora), environment=environment)


def embedding_model(models: Models) -> None:
    """The suite sends ids of BERT's vocabulary, so the weights know more ids than the tokenizer."""
    models.add("vllm_embed", {"model": str(models.embedding()), "runner": "pooling"})


def many_models(models: Models) -> None:
    """What `ci/L0_backend_vllm/vllm_backend/test.sh` lays out."""
    for name in ("vllm_opt", "vllm_load_test", "vllm_invalid_1"):
        models.add(name)
    models.rename_argument("vllm_invalid_1", "enforce_eager", "invalid_attribute")
    models.add("vllm_invalid_2", {"model": "invalid_model"})
    (models.repository / "ensemble_model" / "1").mkdir(parents=True)
    ensemble = models.checkout / "ci" / "L0_backend_vllm" / "vllm_backend" / "ensemble_config.pbtxt"
    shutil.copy(ensemble, models.repository / "ensemble_model" / "config.pbtxt")
    (models.repository / "add_sub" / "1").mkdir(parents=True)
    (models.repository / "add_sub" / "config.pbtxt").write_text(ADD_SUB_CONFIG)
    (models.repository / "add_sub" / "1" / "model.py").write_text(ADD_SUB_MODEL)


def metrics_model(value: str | None, arguments: dict[str, object] | None = None) -> Callable[[Models], None]:
    config = "" if value is None else metrics_parameter(value)
    return lambda models: models.add("vllm_opt", arguments, config)


def metrics_parameter(value: str) -> str:
    return f'\nparameters: {{ key: "REPORT_CUSTOM_METRICS" value: {{ string_value: "{value}" }} }}\n'


def metrics_suite(title: str, test: str, prepare: Callable[[Models], None], *server_arguments: str) -> Suite:
    file = "ci/L0_backend_vllm/metrics_test/vllm_metrics_test.py"
    name = f"VLLMTritonMetricsTest.{test}"
    return Suite(f"metrics_test: {title}", file, prepare, tests=(name,), server_arguments=server_arguments)


SUITES = (
    Suite(
        "additional_outputs",
        "ci/L0_additional_outputs_vllm/additional_outputs_test.py",
        one_model,
        runner="pytest",
    ),
    Suite("enabled_stream", "ci/L0_backend_vllm/enabled_stream/enabled_stream_test.py", one_model),
    Suite(
        "vllm_backend",
        "ci/L0_backend_vllm/vllm_backend/vllm_backend_test.py",
        many_models,
        server_arguments=("--model-control-mode=explicit", "--load-model=vllm_opt"),
    ),
    Suite(
        "embed_request",
        "ci/L0_backend_vllm/vllm_backend/embed_request_test.py",
        embedding_model,
        server_arguments=("--model-control-mode=explicit",),
        is_newer=True,
    ),
    metrics_suite("not asked for", "test_vllm_metrics_disabled", metrics_model(None)),
    metrics_suite("asked for with false", "test_vllm_metrics_disabled", metrics_model("false")),
    metrics_suite("asked for", "test_vllm_metrics", metrics_model("true")),
    metrics_suite("with n", "test_custom_sampling_params", metrics_model("true")),
    metrics_suite(
        "off in model.json", "test_vllm_metrics_disabled", metrics_model("true", {"disable_log_stats": True})
    ),
    metrics_suite("off in the server", "test_vllm_metrics_refused", metrics_model("true"), "--allow-metrics=false"),
    Suite(
        "request_cancellation",
        "ci/L0_backend_vllm/request_cancellation/request_cancellation_test.py",
        one_model,
        log_name="request_cancellation_server.log",
        excused={"test_request_cancellation": LOG_TEXT},
    ),
    Suite(
        "check_health: healthy",
        "ci/L0_check_health_vllm/check_health_test.py",
        one_model,
        runner="pytest",
        tests=("TestCheckHealth::test_vllm_is_healthy",),
    ),
    lora_suite("enabled", True),
    lora_suite('enabled as "true"', "true"),
    lora_suite("not enabled", False),
    lora_suite('not enabled as "false"', "false"),
    Suite("samples/client.py", "samples/client.py", sample_model, runner="script"),
    Suite("samples/client.py, streaming", "samples/client.py", sample_model, runner="script", arguments=STREAMING),
)

# What is in vllm_backend's suite and is not run at all.
NOT_RUN = {
    "accuracy_test": "imports vllm and compares with it",
    "check_health: test_vllm_not_healthy": "makes vLLM's own source unhealthy with a patch",
    "vllm_multi_gpu_test": "needs two GPUs and imports vllm",
}
