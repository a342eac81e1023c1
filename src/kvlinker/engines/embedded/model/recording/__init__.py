"""A model's forward pass recorded as a list of operations that native code can compute."""
