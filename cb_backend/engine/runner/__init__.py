"""A plan computed on a device: buffers, graphs, sampling and what requests ask of their logits."""
