"""Measurements for users' decisions: quality and speed of policies on their model, documents and
server."""
