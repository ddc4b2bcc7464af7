"""cb_backend: in-flight batching for large language models inside NVIDIA Triton Inference Server.

The rooms, from the top down: `cli`, `serving` (the server's Python-backend interface), `study` (traffic
measured and simulated), `front_end` (text in, text out, no torch), `engine` (scheduler and model runner),
`models`, `kv_cache`, `layers`, `kernels`, and the plain data that passes between them (`config`, `traffic`,
`sampling_params`, `token_rules`, `request`, `outputs`, `messages`, `errors`). Imports only go down this list.
"""

__version__ = "0.1.0"
