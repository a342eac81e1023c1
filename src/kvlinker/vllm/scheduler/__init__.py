"""The connector in vLLM's engine core: it decides what is linked when."""
