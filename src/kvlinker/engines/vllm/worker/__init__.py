"""The connector in vLLM's workers: it places KV, computes runs over it, and stores what is
captured."""
