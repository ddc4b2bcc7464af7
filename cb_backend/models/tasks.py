"""What a checkpoint is for: tokens, embeddings, classes or scores; read from its files and the engine's arguments.

A checkpoint says so by the class in `architectures`, and sentence-transformers by `modules.json` and the config of its
pooling. What it asks for and is not built is refused by name. Knows files and specifications, not tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from cb_backend.contracts.config import EngineConfig
from cb_backend.contracts.errors import ConfigError
from cb_backend.contracts.pooling import MAX_SCORE_TOKENS, Activation, ModelTasks
from cb_backend.models.config_reader import ConfigReader
from cb_backend.models.sentence_transformers import Embedding, read_sentence_transformers
from cb_backend.models.spec import ModelSpec
from cb_backend.support.json_files import read_json_object

_CLASSIFIER = "ForSequenceClassification"
_NOT_BUILT = ("ForTokenClassification", "ForQuestionAnswering", "ForMultipleChoice", "ForMaskedLM")
_ACTIVATIONS: dict[str, Activation] = {"Identity": "none", "Sigmoid": "sigmoid"}  # of torch, in sentence-transformers

EncodePlain = Callable[[str], list[int]]  # a text's token ids, nothing added around it


def resolve_tasks(
    folder: Path, spec: ModelSpec, config: EngineConfig, encode: EncodePlain | None
) -> tuple[ModelSpec, ModelTasks]:
    """The specification with the parts that are needed, and what may be asked of the model.

    encode: None where there is no tokenizer. Raises `ConfigError` for arguments that the checkpoint cannot follow, and
    for parts of it that are not built.
    """
    reader = ConfigReader(read_json_object(folder / "config.json"))
    kind = _architecture(reader)
    embedding = read_sentence_transformers(folder, spec.hidden_size)
    is_classifier = kind.endswith(_CLASSIFIER)
    is_bare = kind.endswith("Model")
    has_head = not is_classifier and not is_bare
    runner = config.runner
    if runner == "auto":
        is_pooling = embedding is not None or not has_head or config.classifier_from_token
        runner = "pooling" if is_pooling else "generate"
    if runner in ("generate", "both") and not has_head:
        raise ConfigError(
            f"engine argument runner is {config.runner!r}, but config.json's architecture is {kind}, which has no head"
            " to generate with; use 'auto' or 'pooling'"
        )
    if runner == "generate":
        _refuse_pooling_arguments(config)
        return spec, ModelTasks()
    score_ids = _score_token_ids(config, encode, has_head, kind)
    labels, activation = _read_labels(reader) if is_classifier else ((), "softmax")
    gives_embeddings = not is_classifier and (config.runner != "auto" or not score_ids or embedding is not None)
    tasks = msgspec.structs.replace(
        _with_arguments(embedding or Embedding(), config),
        can_generate=runner == "both",
        embedding_size=spec.hidden_size if gives_embeddings else 0,
        labels=labels,
        activation=activation,
        score_token_ids=score_ids,
        score_template=_template(config),
    )
    needs_head = runner == "both" or bool(score_ids)
    spec = replace(
        spec,
        has_head=needs_head,
        generates=runner == "both",
        num_labels=len(labels),
        tie_word_embeddings=spec.tie_word_embeddings or not needs_head,
    )
    return spec, tasks


def _architecture(reader: ConfigReader) -> str:
    """The class that the checkpoint was saved as; "" where it does not say."""
    names: list[Any] = reader.get("architectures", list, [])
    kind = str(names[0]) if names else ""
    if kind.endswith(_NOT_BUILT):
        raise ConfigError(
            f"{reader.where}: the architecture {kind} is not supported; supported are checkpoints that generate"
            f" (...ForCausalLM), sequence classifiers (...{_CLASSIFIER}) and embedding models (...Model)"
        )
    return kind


def _read_labels(reader: ConfigReader) -> tuple[tuple[str, ...], Activation]:
    """The classifier's labels in order, and what makes probabilities of its numbers."""
    names = reader.get("id2label", dict, {})
    num_labels = len(names) or reader.positive("num_labels", 2, most=1 << 20)  # 2: transformers' default
    labels = tuple(str(names.get(str(index), f"LABEL_{index}")) for index in range(num_labels))
    problem = reader.get("problem_type", str, None)
    if problem == "regression":
        return labels, "none"
    own = reader.get("sentence_transformers", dict, {}).get("activation_fn")
    if own is not None:
        name = str(own).rpartition(".")[2]
        if name not in _ACTIVATIONS:
            raise ConfigError(
                f"{reader.where}: sentence_transformers.activation_fn is {own!r}; supported: {', '.join(_ACTIVATIONS)}"
            )
        return labels, _ACTIVATIONS[name]
    is_single = num_labels == 1 or problem == "multi_label_classification"
    return labels, "sigmoid" if is_single else "softmax"


def _score_token_ids(config: EngineConfig, encode: EncodePlain | None, has_head: bool, kind: str) -> tuple[int, ...]:
    tokens = config.classifier_from_token
    if not tokens:
        return ()
    if not has_head:
        raise ConfigError(
            f"engine argument classifier_from_token needs a head, and config.json's architecture {kind} has none;"
            " remove it"
        )
    if encode is None:
        raise ConfigError("engine argument classifier_from_token needs a tokenizer, and the checkpoint has none")
    if not 2 <= len(tokens) <= MAX_SCORE_TOKENS:
        raise ConfigError(
            f"engine argument classifier_from_token has {len(tokens)} tokens; give 2 to {MAX_SCORE_TOKENS}, the one"
            ' that means yes last (["no", "yes"])'
        )
    ids = []
    for token in tokens:
        found = encode(token)
        if len(found) != 1:
            raise ConfigError(
                f"engine argument classifier_from_token: {token!r} is {len(found)} tokens of this tokenizer; each must"
                " be one"
            )
        ids += found
    return tuple(ids)


def _template(config: EngineConfig) -> str | None:
    template = config.score_template
    if template is not None and not ("{query}" in template and "{document}" in template):
        raise ConfigError("engine argument score_template must hold {query} and {document}, each where its text goes")
    return template


def _with_arguments(embedding: Embedding, config: EngineConfig) -> ModelTasks:
    """What the checkpoint says of embeddings, unless the deployment says otherwise."""
    return ModelTasks(
        pooling=embedding.pooling if config.pooling is None else config.pooling,  # type: ignore[arg-type]
        is_normalized=embedding.is_normalized if config.normalize is None else config.normalize,
        dimensions=embedding.dimensions,
    )


def _refuse_pooling_arguments(config: EngineConfig) -> None:
    given = {
        "classifier_from_token": config.classifier_from_token,
        "score_template": config.score_template,
        "pooling": config.pooling,
        "normalize": config.normalize,
    }
    for name, value in given.items():
        if value not in (None, ()):
            raise ConfigError(
                f"engine argument {name} changes nothing for a model that generates only; remove it, or set runner"
                " 'pooling' or 'both'"
            )
