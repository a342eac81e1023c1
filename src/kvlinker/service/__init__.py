"""What an ``LLM`` is made of: context caches, implicit reuse, the reading of prompts, the audit,
and start-up."""
