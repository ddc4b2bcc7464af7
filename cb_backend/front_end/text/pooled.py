"""A pooling request's texts as token ids, and what the engine read off them as the client wants it.

Cutting, norming and probabilities are a few operations on a vector and are done here, in float64.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cb_backend.contracts.errors import InvalidRequestError
from cb_backend.contracts.pooling import Activation
from cb_backend.contracts.request import check_prompt_length
from cb_backend.front_end.text.prompt import MAX_TRUNCATION, truncated
from cb_backend.front_end.text.tokenizer import Tokenizer
from cb_backend.front_end.wire.pooling_request import PoolingRequest


def pooled_token_ids(
    pooling: PoolingRequest, tokenizer: Tokenizer, max_model_len: int, template: str | None
) -> list[list[int]]:
    """Token ids of the text, or of the text with each document.

    template: of a pair, with {query} and {document}; None: the tokenizer's own way with pairs. Raises
    `InvalidRequestError` for texts that are empty or too long; of several, it says which.
    """
    limit = pooling.truncate_prompt_tokens
    times = 1 if limit is None else MAX_TRUNCATION
    if pooling.documents is None:
        ids = pooling.input_ids or tokenizer.encode(pooling.text, max_model_len, times)
        return [_checked(ids, limit, max_model_len, tokenizer)]
    found = []
    for index, document in enumerate(pooling.documents):
        try:
            if template is None:
                ids = tokenizer.encode_pair(pooling.text, document, max_model_len, times)
            else:
                ids = tokenizer.encode(filled(template, pooling.text, document), max_model_len, times)
            found.append(_checked(ids, limit, max_model_len, tokenizer))
        except InvalidRequestError as error:
            raise InvalidRequestError(f"text_pair[{index}]: {error}") from None
    return found


def filled(template: str, query: str, document: str) -> str:
    """The template with the texts in their places; what they say is not looked into."""
    parts = template.split("{query}")
    return query.join(document.join(part.split("{document}")) for part in parts)


def _checked(ids: list[int], limit: int | None, max_model_len: int, tokenizer: Tokenizer) -> list[int]:
    if limit is not None:
        ids = truncated(ids, max_model_len if limit == -1 else limit, tokenizer.bos_token_id)
    check_prompt_length(len(ids), max_model_len, has_output=False)
    return ids


def finished(pooling: PoolingRequest, values: NDArray[np.float32]) -> NDArray[np.float32]:
    """What the client gets of one text: an embedding [dimensions], the classes' figures [num_labels], or a score [1].

    values: [size] as the engine read them off.
    """
    if pooling.task == "embed":
        vector = values[: pooling.dimensions].astype(np.float64)
        length = np.linalg.norm(vector)
        return (vector / length if pooling.is_normalized and length > 0 else vector).astype(np.float32)
    if pooling.rules.readout == "head":
        return _share_of_last(values.astype(np.float64), pooling.activation)
    return activated(values.astype(np.float64), pooling.activation).astype(np.float32)


def activated(values: NDArray[np.float64], activation: Activation) -> NDArray[np.float64]:
    """Probabilities of a classifier's numbers, or the numbers."""
    if activation == "softmax":
        powers = np.exp(values - values.max())
        return powers / powers.sum()
    return 1.0 / (1.0 + np.exp(-values)) if activation == "sigmoid" else values


def _share_of_last(logits: NDArray[np.float64], activation: Activation) -> NDArray[np.float32]:
    """The probability of the last token among those given, or its log-odds: [1]."""
    log_odds = logits[-1:] - np.logaddexp.reduce(logits[:-1])
    return activated(log_odds, "sigmoid" if activation == "softmax" else "none").astype(np.float32)
