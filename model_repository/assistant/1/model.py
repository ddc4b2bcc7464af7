"""Calls `llm` for each question and passes its pieces on as they come. Threads do it: `execute` returns at once."""

import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = 1  # pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
CUT_OFF = " [cut off at the limit of tokens]"


class TritonPythonModel:
    def initialize(self, args):
        parameters = {name: p["string_value"] for name, p in json.loads(args["model_config"])["parameters"].items()}
        self.sampling = {
            "max_tokens": int(parameters["max_tokens"]),
            "timeout_ms": int(parameters["timeout_ms"]),
            "temperature": 0,
        }
        self.pool = ThreadPoolExecutor(int(parameters["threads"]))

    def execute(self, requests):
        for request in requests:
            # The request's tensors are the server's again once `execute` returns: copy what the thread needs.
            question = pb_utils.get_input_tensor_by_name(request, "question").as_numpy().reshape(-1)[0].decode()
            stream = pb_utils.get_input_tensor_by_name(request, "stream")
            is_streaming = stream is not None and bool(stream.as_numpy().reshape(-1)[0])
            self.pool.submit(self.answer, question, is_streaming, request.get_response_sender())

    def finalize(self):
        self.pool.shutdown(wait=True)

    def answer(self, question, is_streaming, sender):
        """Whatever happens, exactly one response carries the final flag."""
        try:
            if len(question.split()) < 2:
                raise ValueError("please ask with at least two words")
            pieces = self.pieces(question, sender)
            if is_streaming:
                for text in pieces:
                    sender.send(text_response(text))
                sender.send(flags=FINAL)
            else:
                sender.send(text_response("".join(pieces)), flags=FINAL)
        except Exception as error:
            code = pb_utils.TritonError.INVALID_ARG if isinstance(error, ValueError) else pb_utils.TritonError.INTERNAL
            sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error), code)), flags=FINAL)

    def pieces(self, question, sender):
        """Texts as `llm` gives them; they end early when the client has gone."""
        call = llm_request(question, self.sampling)
        reason = None
        responses = call.exec(decoupled=True)
        for response in responses:
            if response.has_error():
                raise RuntimeError(response.error().message())
            if not response.output_tensors():
                continue  # a last response may hold nothing but the final flag
            if sender.is_cancelled():
                if hasattr(responses, "cancel"):
                    responses.cancel()
                return
            reason = first(response, "finish_reason")
            yield first(response, "text_output")
        if reason == "length":
            yield CUT_OFF


def llm_request(question, sampling):
    messages = [{"role": "user", "content": question}]
    return pb_utils.InferenceRequest(
        model_name="llm",
        requested_output_names=["text_output", "finish_reason"],
        inputs=[
            string_tensor("messages", json.dumps(messages)),
            string_tensor("sampling_parameters", json.dumps(sampling)),
            pb_utils.Tensor("stream", np.array([True])),
            pb_utils.Tensor("return_finish_reason", np.array([True])),
        ],
    )


def first(response, name):
    return pb_utils.get_output_tensor_by_name(response, name).as_numpy().reshape(-1)[0].decode()


def text_response(text):
    return pb_utils.InferenceResponse([string_tensor("text_output", text)])


def string_tensor(name, text):
    return pb_utils.Tensor(name, np.array([text.encode()], dtype=np.object_))
