"""The connector in vLLM's workers: chunks placed, runs computed, KV captured and compared."""
