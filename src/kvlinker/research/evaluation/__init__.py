"""Answer quality: examples, the policies' answers to them, and metrics. Uses kvlinker as any user of ``LLM`` does."""
