"""How upset is the writer of a text? sigmoid(bias + counts . weights), for a batch of texts in one product."""

import json
import re
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

FIRST, NORMAL = -10, 0  # priorities at `llm`: the smaller one goes first


class TritonPythonModel:
    def initialize(self, args):
        folder = Path(args["model_repository"]) / args["model_version"]
        weights = json.loads((folder / "weights.json").read_text())
        self.columns = {word: i for i, word in enumerate(weights["words"])}
        self.weights = np.array(list(weights["words"].values()), dtype=np.float32)
        self.bias = np.float32(weights["bias"])

    def execute(self, requests):
        texts = [pb_utils.get_input_tensor_by_name(r, "text_input").as_numpy().reshape(-1)[0] for r in requests]
        upset = self.score([text.decode(errors="replace") for text in texts])
        return [self.respond(probability) for probability in upset]

    def score(self, texts):
        counts = np.zeros((len(texts), len(self.weights)), dtype=np.float32)  # [num_texts, num_words]
        for row, text in enumerate(texts):
            for word in re.findall(r"[a-z']+", text.lower()):
                if word in self.columns:
                    counts[row, self.columns[word]] += 1
        return 1 / (1 + np.exp(-(self.bias + counts @ self.weights)))  # [num_texts]

    def respond(self, probability):
        sampling = {"max_tokens": 64, "temperature": 0, "priority": FIRST if probability > 0.5 else NORMAL}
        return pb_utils.InferenceResponse(
            [
                pb_utils.Tensor("upset", np.array([probability], dtype=np.float32)),
                pb_utils.Tensor("sampling_parameters", np.array([json.dumps(sampling).encode()], dtype=np.object_)),
            ]
        )
