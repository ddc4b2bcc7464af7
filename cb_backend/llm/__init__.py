"""The Python API: a model in the caller's own process, with the rules of the server's requests."""
