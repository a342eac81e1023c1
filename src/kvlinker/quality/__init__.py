"""What users measure to decide: quality and speed of policies on their model, their documents and
their server."""
