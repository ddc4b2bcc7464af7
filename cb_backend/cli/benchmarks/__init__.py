"""What `cb-backend bench` measures, on which workloads and machine, and how it reports it."""
