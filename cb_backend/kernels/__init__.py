"""One operation a file: the kernel and its torch twin, which is the CPU path, the oracle and the specification."""
