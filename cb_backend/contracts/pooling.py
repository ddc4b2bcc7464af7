"""Vectors and scores instead of tokens: what the engine is to read off a prompt, and what a model can give.

A pooling request ends with its prompt: hidden states are pooled to one vector, which is given as it is (an embedding),
or goes through a classifier, or through a few rows of the head. What is made of the numbers (cut, normed, turned into
probabilities) is the front end's work.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from cb_backend.contracts.errors import InvalidRequestError

Task = Literal["embed", "classify", "score"]
Pooling = Literal["last", "mean"]
Readout = Literal["hidden", "classifier", "head"]
Activation = Literal["softmax", "sigmoid", "none"]

TASKS: tuple[Task, ...] = ("embed", "classify", "score")
POOLINGS: tuple[Pooling, ...] = ("last", "mean")
MAX_SCORE_TOKENS = 64


class PoolingRules(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the engine reads off one prompt. Travels as it is."""

    pooling: Pooling = "last"  # the hidden state of the last token | the mean of all tokens' ones
    # hidden: the pooled state | classifier: its product with the classifier | head: its logits of `token_ids`
    readout: Readout = "hidden"
    token_ids: tuple[int, ...] = ()

    def check(self, vocab_size: int) -> None:
        """Raise `InvalidRequestError` for ids that are not the head's, and for a state that it does not read."""
        for token_id in self.token_ids:
            if not 0 <= token_id < vocab_size:
                raise InvalidRequestError(f"token id {token_id} is outside the vocabulary (0 to {vocab_size - 1})")
        if (self.readout == "head") != bool(self.token_ids):
            raise InvalidRequestError("token_ids go with the readout 'head', and with no other")
        if self.readout == "head" and self.pooling != "last":
            raise InvalidRequestError(f"the head reads the last token's state; pooling {self.pooling!r} is not for it")


class ModelTasks(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an engine's model can be asked for, and how where a request leaves it open."""

    can_generate: bool = True
    embedding_size: int = 0  # 0: it gives no embeddings
    pooling: Pooling = "last"
    is_normalized: bool = True  # embeddings have length 1
    dimensions: tuple[int, ...] = ()  # that embeddings may be cut to; empty: any
    labels: tuple[str, ...] = ()  # of its classifier; empty: it has none
    activation: Activation = "softmax"  # of the classifier's numbers
    score_token_ids: tuple[int, ...] = ()  # the score is the last one's share among them
    score_template: str | None = None  # of a pair, with {query} and {document}; None: one after the other

    @property
    def tasks(self) -> tuple[Task, ...]:
        """Of pooling, those that are served."""
        can_score = bool(self.score_token_ids) or len(self.labels) == 1
        has: dict[Task, bool] = {"embed": self.embedding_size > 0, "classify": bool(self.labels), "score": can_score}
        return tuple(task for task in TASKS if has[task])

    def check(self, rules: PoolingRules | None) -> None:
        """Raise `InvalidRequestError` for a request, None: of text, that the model has no part for."""
        if rules is None and not self.can_generate:
            raise InvalidRequestError(f"this model does not generate; it serves {' and '.join(self.tasks)}")
        has_part = {"hidden": self.embedding_size > 0, "classifier": bool(self.labels), "head": self.score_token_ids}
        if rules is not None and not has_part[rules.readout]:
            raise InvalidRequestError(f"this model has no part for {rules.readout!r}; it was started without one")
