"""Steps that native code computes by the program of a model's pass."""
