"""The wire contract as the server's model configuration: vllm_backend's tensors and a few more.

They are filled in where config.pbtxt leaves them out. Knows names, types and shapes, not meanings (those are
`front_end.wire.protocol`'s).
"""

from __future__ import annotations

from typing import Any

# name, type, dims, optional
INPUTS: tuple[tuple[str, str, list[int], bool], ...] = (
    ("text_input", "TYPE_STRING", [1], True),
    ("input_ids", "TYPE_INT32", [-1], True),
    ("messages", "TYPE_STRING", [1], True),
    ("pooling", "TYPE_STRING", [1], True),
    ("text_pair", "TYPE_STRING", [-1], True),
    ("embedding_request", "TYPE_STRING", [1], True),
    ("stream", "TYPE_BOOL", [1], True),
    ("sampling_parameters", "TYPE_STRING", [1], True),
    ("exclude_input_in_output", "TYPE_BOOL", [1], True),
    ("return_finish_reason", "TYPE_BOOL", [1], True),
    ("return_cumulative_logprob", "TYPE_BOOL", [1], True),
    ("return_logprobs", "TYPE_BOOL", [1], True),
    ("return_num_input_tokens", "TYPE_BOOL", [1], True),
    ("return_num_output_tokens", "TYPE_BOOL", [1], True),
    ("return_stop_reason", "TYPE_BOOL", [1], True),
    ("return_output_ids", "TYPE_BOOL", [1], True),
    ("tokenize", "TYPE_STRING", [1], True),
)
OUTPUTS: tuple[tuple[str, str, list[int]], ...] = (
    ("text_output", "TYPE_STRING", [-1]),
    ("finish_reason", "TYPE_STRING", [-1]),
    ("cumulative_logprob", "TYPE_FP32", [-1]),
    ("logprobs", "TYPE_STRING", [-1]),
    ("num_input_tokens", "TYPE_UINT32", [1]),
    ("num_output_tokens", "TYPE_UINT32", [-1]),
    ("stop_reason", "TYPE_STRING", [-1]),
    ("output_ids", "TYPE_INT32", [-1]),
    ("prompt_logprobs", "TYPE_STRING", [1]),
    ("tokenized", "TYPE_STRING", [1]),
    ("embedding", "TYPE_FP32", [-1]),
    ("scores", "TYPE_FP32", [-1]),
)


def complete_model_config(model_config: Any) -> Any:
    """Add tensors, decoupled mode and batch size 0 to the server's `ModelConfig`; changes and returns it."""
    for name, data_type, dims, is_optional in INPUTS:
        tensor: dict[str, Any] = {"name": name, "data_type": data_type, "dims": dims}
        if is_optional:
            tensor["optional"] = True
        model_config.add_input(tensor)
    for name, data_type, dims in OUTPUTS:
        model_config.add_output({"name": name, "data_type": data_type, "dims": dims})
    model_config.set_model_transaction_policy({"decoupled": True})
    model_config.set_max_batch_size(0)
    return model_config


def num_instances(model_config: dict[str, Any]) -> int:
    """How many front ends the server starts for this model; `model_config` as the server gives it to a model."""
    groups = model_config.get("instance_group", [])
    return max(sum(group.get("count", 1) * max(len(group.get("gpus", [])), 1) for group in groups), 1)
