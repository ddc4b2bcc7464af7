"""The rooms of the load test: traces, workload, prompts, wire, worker, fleet, summary, report.

`client/load_test.py` is the command over them. They know the wire of the served model (that of vllm_backend) and
nothing of the server's code.
"""
