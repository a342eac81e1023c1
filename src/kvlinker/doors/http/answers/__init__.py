"""Answers prompts: OpenAI's two completion routes, and what all routes that generate share."""
