"""The engine in this process: a thin core over unmodified Hugging Face models."""
