"""The parts of an ``LLM``: context caches, implicit reuse, the reading of prompts, the audit, and
start-up."""
