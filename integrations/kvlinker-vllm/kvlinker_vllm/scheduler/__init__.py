"""The connector in vLLM's engine core: it decides which requests are linked, and when."""
