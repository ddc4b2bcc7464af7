"""The door between the server and this backend, for clients of TensorRT-LLM's models."""

from cb_backend.serving.trtllm import TritonPythonModel

__all__ = ["TritonPythonModel"]
