"""Text to ids, `llm` by ids, ids to text with a decoder that remembers. Threads do it: `execute` returns at once."""

import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import triton_python_backend_utils as pb_utils
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from cb_backend.models.checkpoint import resolve_checkpoint, resolve_tokenizer
from cb_backend.support.native_paths import native_path

FINAL = 1  # pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def initialize(self, args):
        # The same tokenizer as `llm`'s, found through its engine arguments.
        neighbour = native_path(args["model_repository"]).parent / "llm" / "1" / "model.json"
        arguments = json.loads(neighbour.read_text(encoding="utf-8"))
        folder = resolve_tokenizer(arguments.get("tokenizer"), resolve_checkpoint(arguments["model"]))
        self.tokenizer = Tokenizer.from_buffer((folder / "tokenizer.json").read_bytes())
        parameters = json.loads(args["model_config"])["parameters"]
        self.pool = ThreadPoolExecutor(int(parameters["threads"]["string_value"]))

    def execute(self, requests):
        for request in requests:
            text = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy().reshape(-1)[0].decode()
            limit = pb_utils.get_input_tensor_by_name(request, "max_tokens")
            max_tokens = 64 if limit is None else int(limit.as_numpy().reshape(-1)[0])
            stream = pb_utils.get_input_tensor_by_name(request, "stream")
            is_streaming = stream is not None and bool(stream.as_numpy().reshape(-1)[0])
            self.pool.submit(self.answer, text, max_tokens, is_streaming, request.get_response_sender())

    def finalize(self):
        self.pool.shutdown(wait=True)

    def answer(self, text, max_tokens, is_streaming, sender):
        """Whatever happens, exactly one response carries the final flag."""
        try:
            pieces = self.pieces(self.tokenizer.encode(text).ids, max_tokens, sender)
            if is_streaming:
                for text, ids in pieces:
                    sender.send(piece(text, ids))
                sender.send(flags=FINAL)
            else:
                whole = list(pieces)
                ids = [token_id for _, new_ids in whole for token_id in new_ids]
                sender.send(piece("".join(text for text, _ in whole), ids), flags=FINAL)
        except Exception as error:
            sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error))), flags=FINAL)

    def pieces(self, prompt_ids, max_tokens, sender):
        """(text, ids) as `llm` gives them; they end early when the client has gone."""
        decoder = DecodeStream(skip_special_tokens=True)  # of this request: holds back what is no whole character yet
        ids, sent = [], ""
        responses = llm_request(prompt_ids, max_tokens).exec(decoupled=True)
        for response in responses:
            if response.has_error():
                raise RuntimeError(response.error().message())
            if not response.output_tensors():
                continue  # a last response may hold nothing but the final flag
            if sender.is_cancelled():
                if hasattr(responses, "cancel"):  # servers from 25.04 on; before, the call runs to its end
                    responses.cancel()
                return
            new_ids = pb_utils.get_output_tensor_by_name(response, "output_ids").as_numpy().tolist()
            text = "".join(decoder.step(self.tokenizer, token_id) or "" for token_id in new_ids)
            ids, sent = ids + new_ids, sent + text
            yield text, new_ids
        rest = self.tokenizer.decode(ids)[len(sent) :]
        if rest:  # the answer ends inside a character
            yield rest, []


def llm_request(prompt_ids, max_tokens):
    sampling = json.dumps({"max_tokens": max_tokens, "temperature": 0})
    return pb_utils.InferenceRequest(
        model_name="llm",
        requested_output_names=["output_ids"],
        inputs=[
            pb_utils.Tensor("input_ids", np.array(prompt_ids, dtype=np.int32)),
            pb_utils.Tensor("sampling_parameters", np.array([sampling.encode()], dtype=np.object_)),
            pb_utils.Tensor("stream", np.array([True])),
            pb_utils.Tensor("return_output_ids", np.array([True])),
        ],
    )


def piece(text, ids):
    return pb_utils.InferenceResponse(
        [
            pb_utils.Tensor("text_output", np.array([text.encode()], dtype=np.object_)),
            pb_utils.Tensor("token_ids", np.array(ids, dtype=np.int32)),
        ]
    )
