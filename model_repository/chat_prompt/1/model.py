"""Chat messages of a question and what was said before it. Rendering them is `llm`'s, which has the template."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        self.system = {"role": "system", "content": parameters["system"]["string_value"]}
        self.sampling = parameters["sampling_parameters"]["string_value"]

    def execute(self, requests):
        return [self.respond(request) for request in requests]

    def respond(self, request):
        question = text_of(request, "question")
        try:
            history = json.loads(text_of(request, "history") or "[]")
            assert isinstance(history, list)
        except (ValueError, AssertionError):
            return failure("history must be a JSON list of messages")
        messages = [self.system, *history, {"role": "user", "content": question}]
        return pb_utils.InferenceResponse(
            [string_tensor("messages", json.dumps(messages)), string_tensor("sampling_parameters", self.sampling)]
        )


def text_of(request, name):
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return None if tensor is None else tensor.as_numpy().reshape(-1)[0].decode()


def string_tensor(name, text):
    return pb_utils.Tensor(name, np.array([text.encode()], dtype=np.object_))


def failure(message):
    """An error ends the whole ensemble with this text."""
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, pb_utils.TritonError.INVALID_ARG))
