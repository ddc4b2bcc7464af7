"""`TritonPythonModel` with the tensors of TensorRT-LLM's models: another wire over the same front end.

Everything but reading a request is `serving.backend`'s. The tensors stand in the model's config.pbtxt.
"""

from __future__ import annotations

import json
from typing import Any

from numpy.typing import NDArray

from cb_backend.contracts.errors import InvalidRequestError
from cb_backend.front_end.wire.protocol import GenerateRequest
from cb_backend.front_end.wire.trtllm_protocol import parse_trtllm_request
from cb_backend.serving import backend
from cb_backend.serving.model_parameters import excludes_input


class TritonPythonModel(backend.TritonPythonModel):
    """One front end, as the server makes it."""

    @staticmethod
    def auto_complete_config(auto_complete_model_config: Any) -> Any:
        auto_complete_model_config.set_model_transaction_policy({"decoupled": True})
        return auto_complete_model_config

    def initialize(self, args: dict[str, str]) -> None:
        self._is_input_excluded = excludes_input(json.loads(args["model_config"]))
        super().initialize(args)

    def parse(self, inputs: dict[str, NDArray[Any]], parameters: str, vocab_size: int) -> GenerateRequest:
        if parameters not in ("", "{}"):
            raise InvalidRequestError("this model takes its parameters as tensors; send none as request parameters")
        return parse_trtllm_request(inputs, vocab_size, self._is_input_excluded)
