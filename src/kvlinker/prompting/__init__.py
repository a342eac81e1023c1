"""Prompts are built here: messages, texts and chunks become segments of token ids."""
