"""Answers in OpenAI's shapes."""
