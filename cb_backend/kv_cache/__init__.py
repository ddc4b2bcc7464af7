"""Paged KV cache: which block belongs to whom (no torch), and the tensors behind the blocks."""
