"""The connector in vLLM's workers: it places KV, computes runs over it, and stores captured
chunks."""
