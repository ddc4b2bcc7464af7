"""The OpenAI gateway."""
