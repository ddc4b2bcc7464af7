"""The building blocks that every architecture shares."""
