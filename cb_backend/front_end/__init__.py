"""From a user's text to engine requests and back. Knows neither torch nor the server.

`wire` reads what a client sent, `text` turns it into token ids and the engine's into text, `engines` keeps engine
processes running and carries requests to them.
"""
