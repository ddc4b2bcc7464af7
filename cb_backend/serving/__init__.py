"""The only room that knows NVIDIA Triton Inference Server."""
