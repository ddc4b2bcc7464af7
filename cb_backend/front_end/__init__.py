"""From a user's text to engine requests and back. Knows neither torch nor the server."""
