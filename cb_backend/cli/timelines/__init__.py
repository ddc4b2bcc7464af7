"""A log of steps as a picture of the batch."""
