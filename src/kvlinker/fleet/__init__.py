"""Sends requests to the server that has their chunks in memory: a library, and a router over
HTTP."""
