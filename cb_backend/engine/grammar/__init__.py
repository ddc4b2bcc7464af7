"""Structured output: grammars compiled, requests held until theirs is, and the masks of tokens. No torch."""
