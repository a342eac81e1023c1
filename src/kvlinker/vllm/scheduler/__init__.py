"""The connector in vLLM's engine core: what is linked when."""
