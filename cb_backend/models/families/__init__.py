"""The families of models that can be served: a file each, named after the `model_type` that it reads.

Each has one function, `read_spec(reader) -> ModelSpec`. Absent keys get the defaults transformers gives them, because
published files rely on those.
"""
