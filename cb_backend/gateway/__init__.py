"""OpenAI's HTTP API as a client of a Triton server: a process of its own, which knows no engine."""
