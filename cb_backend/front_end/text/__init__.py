"""A client's text to token ids, and token ids to the text that goes out."""
