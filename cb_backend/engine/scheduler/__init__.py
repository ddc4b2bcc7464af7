"""What is computed in which step: the queue, the slots, the plan of a step and what its result means. No torch."""
