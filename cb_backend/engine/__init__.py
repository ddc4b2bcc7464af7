"""The engine: scheduler, model runner, sampler, and the process that runs them."""
