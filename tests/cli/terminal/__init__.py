"""The terminal's commands."""
