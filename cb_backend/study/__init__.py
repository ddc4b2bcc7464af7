"""Traffic run through the engine and measured, on a device or simulated, and what follows from it for the settings."""
