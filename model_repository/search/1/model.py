"""Finds the documents nearest to a question, has them reranked, and lets a model answer with the best before it."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = 1  # pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
PROMPT = "Document: {document}\nQuestion: {question}\nAnswer:"


class TritonPythonModel:
    def initialize(self, args):
        self.names = {name: p["string_value"] for name, p in json.loads(args["model_config"])["parameters"].items()}
        file = Path(args["model_repository"]) / args["model_version"] / "documents.txt"
        self.documents = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        self.vectors = None  # [num_documents, size], made at the first question: `llm` may load after this model
        self.lock = threading.Lock()
        self.pool = ThreadPoolExecutor(int(self.names["threads"]))

    def execute(self, requests):
        for request in requests:
            question = pb_utils.get_input_tensor_by_name(request, "question").as_numpy().reshape(-1)[0].decode()
            self.pool.submit(self.answer, question, request.get_response_sender())

    def finalize(self):
        self.pool.shutdown(wait=True)

    def answer(self, question, sender):
        """Whatever happens, exactly one response carries the final flag."""
        try:
            found = self.retrieve(question, int(self.names["candidates"]))
            documents, scores = self.rerank(question, found)
            sampling = json.dumps({"max_tokens": int(self.names["max_tokens"]), "temperature": 0})
            prompt = PROMPT.format(document=documents[0], question=question)
            inputs = {"text_input": prompt, "sampling_parameters": sampling, "exclude_input_in_output": True}
            text = ask(self.names["answers"], "text_output", **inputs)
            tensors = [
                tensor_of("text_output", text[0].decode()),
                tensor_of("documents", documents),
                pb_utils.Tensor("scores", scores),
            ]
            sender.send(pb_utils.InferenceResponse(tensors), flags=FINAL)
        except Exception as error:
            told = pb_utils.TritonError(str(error), pb_utils.TritonError.INTERNAL)
            sender.send(pb_utils.InferenceResponse(error=told), flags=FINAL)

    def retrieve(self, question, number):
        """The documents whose embeddings are nearest; all have length 1, so a product is a cosine."""
        with self.lock:
            if self.vectors is None:
                self.vectors = np.stack([self.embed(document) for document in self.documents])
        order = np.argsort(-(self.vectors @ self.embed(question)), kind="stable")
        return [self.documents[index] for index in order[:number]]

    def embed(self, text):
        return ask(self.names["embeds"], "embedding", text_input=text, pooling='{"task": "embed"}')

    def rerank(self, question, documents):
        """One request: the question's part of the prompts is computed once."""
        inputs = {"text_input": question, "text_pair": documents, "pooling": '{"task": "score"}'}
        scores = ask(self.names["reranks"], "scores", **inputs)
        order = np.argsort(-scores, kind="stable")
        return [documents[index] for index in order], scores[order]


def ask(model, output, **inputs):
    """One output of another model's only response."""
    call = pb_utils.InferenceRequest(
        model_name=model,
        requested_output_names=[output],
        inputs=[tensor_of(name, value) for name, value in inputs.items()],
    )
    for response in call.exec(decoupled=True):
        if response.has_error():
            raise RuntimeError(response.error().message())
        for tensor in response.output_tensors():
            if tensor.name() == output:
                return np.array(tensor.as_numpy()).reshape(-1)
    raise RuntimeError(f"{model} gave no {output}")


def tensor_of(name, value):
    if isinstance(value, bool):
        return pb_utils.Tensor(name, np.array([value]))
    texts = value if isinstance(value, list) else [value]
    return pb_utils.Tensor(name, np.array([text.encode() for text in texts], dtype=np.object_))
