"""One operation a file: the kernel and its torch twin."""
