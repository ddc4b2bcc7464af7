"""A Triton server on this machine: found, given models, started, watched, ended."""
