"""The door between the server and this backend. Everything behind it is in the installed package."""

from cb_backend.serving.backend import TritonPythonModel

__all__ = ["TritonPythonModel"]
