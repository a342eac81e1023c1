"""Sends requests to the server that has their chunks in memory: a library, a router over HTTP, and
a fleet on Ray Serve. Loggers are named below ``kvlinker``, whose handlers write them."""
