"""GGUF files: `source` says which files belong to one model and opens them, `model_settings` and `vocabulary` read
their metadata, `rope_scaling` and `pre_tokenizers` know its conventions, `tensors` and `tokenizer` convert, and
`conversion` writes the checkpoint folder and checks it against the file.
"""
