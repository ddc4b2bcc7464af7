"""Model architectures, one a file, named by their Hugging Face `model_type`."""
