"""The commands of `cb-backend`: a module a command, thin over the package's rooms.

What several commands need stands in rooms of its own: `server` (a Triton server on this machine), `benchmarks`,
`timelines`.
"""
