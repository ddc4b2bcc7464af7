"""The engine: requests in, tokens out.

`engine_process` (behind a socket, by the loop of `engine_loop`) and `llm_engine` (the same in process) stand at the
top. Under them are three rooms: `scheduler` decides what a step computes, `runner` computes it, `grammar` says what
structured output may say. The scheduler and the runner know each other only by the plans and results of
`cb_backend.contracts.step`.
"""
