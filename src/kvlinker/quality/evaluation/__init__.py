"""Measures answer quality: examples, the policies' answers to them, and metrics, through ``LLM`` as
any user has it."""
