"""`/tokenize` and `/detokenize`, in vLLM's form. The model's front end does both: the gateway has no tokenizer."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

from cb_backend.gateway.adapters import Chosen
from cb_backend.gateway.bodies import Body
from cb_backend.gateway.errors import ApiError, bad_request
from cb_backend.gateway.requests import messages_input
from cb_backend.gateway.tool_choice import take_tools
from cb_backend.gateway.triton import Model, Triton

NO_TOKEN = {"prompt": ""}


Choose = Callable[[str], Awaitable[Chosen]]


class Tokens:
    """The two endpoints. `choose` finds the model that a body names; an adapter has its model's tokens."""

    def __init__(self, choose: Choose) -> None:
        self._choose = choose

    async def tokenize(self, body: Body, triton: Triton, request_id: str) -> dict[str, Any]:
        """{"count", "max_model_len", "tokens", "token_strs"} of a `prompt` or of `messages`. Raises `ApiError`."""
        model = await self._model(body, triton)
        options = {"return_token_strs": body.take("return_token_strs", bool) or False}
        if "messages" in body.left:
            if "prompt" in body.left:
                raise bad_request("'prompt' and 'messages' are both given; send one", "prompt")
            body.refuse("add_special_tokens", "a chat template says which there are", (False,))
            inputs: dict[str, Any] = {"messages": messages_input(body, take_tools(body))}
        else:
            options["add_special_tokens"] = body.take("add_special_tokens", bool) is not False
            inputs = {"text_input": body.need("prompt", str)}
        _refuse_rest(body)
        told = json.loads((await _ask(triton, model, inputs, options, request_id)).tokenized)
        return {name: told[name] for name in ("count", "max_model_len", "tokens", "token_strs")}

    async def detokenize(self, body: Body, triton: Triton, request_id: str) -> dict[str, Any]:
        """{"prompt"}: what `tokens` spell, special ones as they are written. Raises `ApiError`."""
        model = await self._model(body, triton)
        tokens = body.need("tokens", list)
        if not all(type(token) is int and 0 <= token < 2**31 for token in tokens):
            raise bad_request("'tokens' must be a list of token ids (0 to 2^31 - 1)", "tokens")
        _refuse_rest(body)
        if not tokens:
            return NO_TOKEN
        return {"prompt": (await _ask(triton, model, {"input_ids": tokens}, {}, request_id)).texts[0]}

    async def _model(self, body: Body, triton: Triton) -> Model:
        """The body's `model`; without one the only model that there is. Raises `ApiError`."""
        name = body.take("model", str)
        if name is None:
            models = await triton.models()
            if len(models) != 1:
                known = ", ".join(sorted(models)) or "none"
                raise bad_request(f"'model' is missing; there is: {known}", "model")
            (name,) = models
        model = (await self._choose(name)).model
        if not model.tells_tokens:
            raise bad_request(f"the model {name!r} has no input 'tokenize'; its tokens cannot be told", "model")
        return model


async def _ask(triton: Triton, model: Model, inputs: dict[str, Any], options: dict[str, bool], request_id: str) -> Any:
    return await triton.ask(model.name, {**inputs, "tokenize": json.dumps(options)}, request_id)


def _refuse_rest(body: Body) -> None:
    for name in body.left:
        raise ApiError(400, f"{name!r} has no meaning here; leave it out", param=name)
