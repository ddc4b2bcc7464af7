"""What a checkpoint and the engine's arguments say a model is for; what is not built is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cb_backend.contracts.config import engine_config_from_dict
from cb_backend.contracts.errors import ConfigError
from cb_backend.contracts.pooling import ModelTasks
from cb_backend.models.registry import read_model_config
from cb_backend.models.spec import ModelSpec
from cb_backend.models.tasks import resolve_tasks
from tests.models.tiny_checkpoints import write_checkpoint

FLAGS = ("cls_token", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint("qwen3", tmp_path)


def change_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def write_modules(folder: Path, *kinds: str, **pooling: Any) -> None:
    """As sentence-transformers saves a model with these modules."""
    modules = [
        {"idx": index, "name": str(index), "path": f"{index}_{kind}" if index else "", "type": f"a.models.{kind}"}
        for index, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def resolve(folder: Path, encode: Any = lambda text: [ord(text[0])] * len(text), **arguments: Any) -> Any:
    config = engine_config_from_dict({"model": str(folder), **arguments})
    return resolve_tasks(folder, read_model_config(folder), config, encode)


def refusal(folder: Path, **arguments: Any) -> str:
    with pytest.raises(ConfigError) as error:
        resolve(folder, **arguments)
    return str(error.value)


def test_a_checkpoint_that_generates(folder: Path) -> None:
    spec, tasks = resolve(folder)
    assert tasks == ModelTasks()
    assert spec == read_model_config(folder)
    spec, tasks = resolve(folder, runner="both")
    assert (tasks.can_generate, tasks.tasks, tasks.embedding_size) == (True, ("embed",), spec.hidden_size)
    assert spec.generates
    spec, tasks = resolve(folder, runner="pooling", pooling="mean", normalize="false")
    assert (tasks.can_generate, tasks.pooling, tasks.is_normalized) == (False, "mean", False)
    assert not spec.has_head
    assert not spec.generates


def test_scores_from_tokens(folder: Path) -> None:
    spec, tasks = resolve(folder, classifier_from_token='["n", "y"]', score_template="{query}: {document}")
    assert (tasks.tasks, tasks.score_token_ids) == (("score",), (ord("n"), ord("y")))
    assert spec.has_head
    assert not spec.generates
    assert resolve(folder, classifier_from_token=["n", "y"], runner="both")[1].tasks == ("embed", "score")
    for arguments, told in (
        ({"classifier_from_token": ["no", "y"]}, "'no' is 2 tokens of this tokenizer; each must be one"),
        ({"classifier_from_token": ["y"]}, "has 1 tokens; give 2 to 64"),
        ({"classifier_from_token": ["n", "y"], "encode": None}, "needs a tokenizer"),
        ({"classifier_from_token": ["n", "y"], "runner": "generate"}, "changes nothing for a model that generates"),
        ({"classifier_from_token": ["n", "y"], "score_template": "{query}"}, "must hold {query} and {document}"),
        ({"classifier_from_token": [1]}, "must be of type list of strings, got [1]"),
        ({"classifier_from_token": "no"}, "must be of type list of strings"),
        ({"pooling": "mean"}, "engine argument pooling changes nothing"),
        ({"runner": "both", "pooling": "cls"}, "pooling is 'cls'; use one of last, mean"),
        ({"runner": "embed"}, "runner is 'embed'; use one of auto, generate, pooling, both"),
    ):
        assert told in refusal(folder, **arguments), arguments


@pytest.mark.parametrize(("values", "labels", "activation"), [
    ({"id2label": {"0": "bad", "1": "good"}}, ("bad", "good"), "softmax"),
    ({}, ("LABEL_0", "LABEL_1"), "softmax"),
    ({"id2label": {"0": "relevant"}}, ("relevant",), "sigmoid"),
    ({"id2label": {"0": "a", "1": "b"}, "problem_type": "multi_label_classification"}, ("a", "b"), "sigmoid"),
    ({"id2label": {"0": "a"}, "problem_type": "regression"}, ("a",), "none"),
    ({"id2label": {"0": "a"}, "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
     ("a",), "none"),
])  # fmt: skip
def test_sequence_classifiers(folder: Path, values: dict[str, Any], labels: tuple[str, ...], activation: str) -> None:
    change_config(folder, architectures=["Qwen3ForSequenceClassification"], **values)
    spec, tasks = resolve(folder)
    assert (tasks.labels, tasks.activation, spec.num_labels) == (labels, activation, len(labels))
    assert tasks.tasks == (("classify", "score") if len(labels) == 1 else ("classify",))
    assert "has no head to generate with" in refusal(folder, runner="generate")
    assert "classifier_from_token needs a head" in refusal(folder, classifier_from_token=["n", "y"])


def test_what_is_not_built_is_refused(folder: Path) -> None:
    change_config(folder, architectures=["Qwen3ForTokenClassification"])
    assert "the architecture Qwen3ForTokenClassification is not supported; supported are" in refusal(folder)
    change_config(
        folder, architectures=["Qwen3ForSequenceClassification"], sentence_transformers={"activation_fn": "x.Tanh"}
    )
    assert "activation_fn is 'x.Tanh'; supported: Identity, Sigmoid" in refusal(folder)


@pytest.mark.parametrize(("kinds", "pooling", "expected"), [
    (("Transformer", "Pooling", "Normalize"), {"pooling_mode_lasttoken": True}, ("last", True)),
    (("Transformer", "Pooling"), {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, ("mean", False)),
    (("Transformer", "Pooling", "Normalize"), {"pooling_mode": "lasttoken"}, ("last", True)),
    (("Transformer", "Pooling"), {"pooling_mode": "mean"}, ("mean", False)),
])  # fmt: skip
def test_sentence_transformers(folder: Path, kinds: Any, pooling: dict[str, Any], expected: tuple[str, bool]) -> None:
    """Qwen3-Embedding says ForCausalLM; that it is for embeddings, modules.json says."""
    write_modules(folder, *kinds, **pooling)
    spec, tasks = resolve(folder)
    assert (tasks.pooling, tasks.is_normalized) == expected
    assert (tasks.can_generate, tasks.tasks, spec.generates) == (False, ("embed",), False)
    assert resolve(folder, normalize=False, pooling="mean")[1].is_normalized is False
    assert resolve(folder, runner="generate")[1] == ModelTasks(), "who asks for it gets it"


def test_modules_that_are_not_built(folder: Path) -> None:
    for flag in FLAGS:
        write_modules(folder, "Transformer", "Pooling", **{f"pooling_mode_{flag}": True})
        assert f"1_Pooling/config.json: the pooling is {flag}; supported is one of" in refusal(folder)
    write_modules(folder, "Transformer", "Pooling", pooling_mode_mean_tokens=True, pooling_mode_lasttoken=True)
    assert "the pooling is mean_tokens and lasttoken" in refusal(folder)
    write_modules(folder, "Transformer", "Pooling")
    assert "the pooling is not given" in refusal(folder)
    write_modules(folder, "Transformer", "Pooling", "Dense", pooling_mode_mean_tokens=True)
    assert "modules.json names the modules Transformer, Pooling, Dense; supported are" in refusal(folder)
    write_modules(folder, "Transformer", "Pooling", pooling_mode_mean_tokens=True, include_prompt=False)
    assert "include_prompt is false" in refusal(folder)
    write_modules(folder, "Transformer", "Pooling", pooling_mode_mean_tokens=True, word_embedding_dimension=7)
    assert "embeddings have 7 numbers, but the model's hidden states 48" in refusal(folder)
    (folder / "1_Pooling" / "config.json").unlink()
    assert "1_Pooling/config.json is missing" in refusal(folder)
    for text, told in (("[", "modules.json cannot be read"), ("{}", "must hold a JSON list")):
        (folder / "modules.json").write_text(text)
        assert told in refusal(folder)


def test_dimensions_that_a_checkpoint_names(folder: Path) -> None:
    write_modules(folder, "Transformer", "Pooling", pooling_mode_lasttoken=True)
    change_config(folder, matryoshka_dimensions=[16, 32])
    assert resolve(folder)[1].dimensions == (16, 32)
    change_config(folder, matryoshka_dimensions=[0])
    assert "'matryoshka_dimensions' must be a list of numbers" in refusal(folder)


def test_a_bare_decoder_embeds(folder: Path) -> None:
    change_config(folder, architectures=["Qwen3Model"])
    spec, tasks = resolve(folder)
    assert isinstance(spec, ModelSpec)
    assert (tasks.tasks, spec.has_head, spec.tie_word_embeddings) == (("embed",), False, True)
