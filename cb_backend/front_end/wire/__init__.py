"""What a client sent, checked and typed: tensors, parameters, JSON. Knows no tokenizer and no engine."""
