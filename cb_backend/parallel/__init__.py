"""Several devices of one host that hold a model together: what they add up and tell each other."""
