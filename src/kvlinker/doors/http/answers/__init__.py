"""Answers prompts: OpenAI's two completion routes, and the code that all generating routes
share."""
