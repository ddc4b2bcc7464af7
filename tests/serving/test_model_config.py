"""The wire contract that the server is told, against vllm_backend's tensors."""

from __future__ import annotations

import pytest

from cb_backend.serving.model_config import complete_model_config, num_instances
from tests.serving.fake_server import ModelConfig


def test_tensors_of_vllm_backend_are_filled_in() -> None:
    config = complete_model_config(ModelConfig()).config
    inputs = {tensor["name"]: (tensor["data_type"], tensor["dims"]) for tensor in config["input"]}
    flags = ("stream", "exclude_input_in_output", "return_finish_reason", "return_cumulative_logprob")
    flags += ("return_logprobs", "return_num_input_tokens", "return_num_output_tokens")
    flags += ("return_stop_reason", "return_output_ids")  # ours
    assert inputs == {
        "text_input": ("TYPE_STRING", [1]),
        "input_ids": ("TYPE_INT32", [-1]),  # ours
        "messages": ("TYPE_STRING", [1]),  # ours
        "tokenize": ("TYPE_STRING", [1]),  # ours
        "pooling": ("TYPE_STRING", [1]),  # ours
        "text_pair": ("TYPE_STRING", [-1]),  # ours
        "embedding_request": ("TYPE_STRING", [1]),
        "sampling_parameters": ("TYPE_STRING", [1]),
        **{name: ("TYPE_BOOL", [1]) for name in flags},
    }
    assert all(tensor["optional"] for tensor in config["input"])
    assert {tensor["name"]: (tensor["data_type"], tensor["dims"]) for tensor in config["output"]} == {
        "text_output": ("TYPE_STRING", [-1]),
        "finish_reason": ("TYPE_STRING", [-1]),
        "cumulative_logprob": ("TYPE_FP32", [-1]),
        "logprobs": ("TYPE_STRING", [-1]),
        "num_input_tokens": ("TYPE_UINT32", [1]),
        "num_output_tokens": ("TYPE_UINT32", [-1]),
        "stop_reason": ("TYPE_STRING", [-1]),  # ours
        "output_ids": ("TYPE_INT32", [-1]),  # ours
        "prompt_logprobs": ("TYPE_STRING", [1]),  # ours
        "tokenized": ("TYPE_STRING", [1]),  # ours
        "embedding": ("TYPE_FP32", [-1]),  # ours
        "scores": ("TYPE_FP32", [-1]),  # ours
    }
    assert config["model_transaction_policy"] == {"decoupled": True}
    assert config["max_batch_size"] == 0


def test_what_config_pbtxt_says_already_stays() -> None:
    config = ModelConfig()
    config.add_input({"name": "text_input", "data_type": "TYPE_STRING", "dims": [1]})
    names = [tensor["name"] for tensor in complete_model_config(config).config["input"]]
    assert names.count("text_input") == 1


def test_batching_by_the_server_is_refused() -> None:
    with pytest.raises(ValueError, match="max_batch_size"):
        complete_model_config(ModelConfig(max_batch_size=8))


def test_number_of_front_ends() -> None:
    assert num_instances({}) == 1
    assert num_instances({"instance_group": [{"kind": "KIND_CPU", "count": 8, "gpus": []}]}) == 8
    assert num_instances({"instance_group": [{"count": 2, "gpus": [0, 1]}, {"count": 1}]}) == 5
