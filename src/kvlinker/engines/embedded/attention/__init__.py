"""Attention kernels: PyTorch's own, and one in C++ for CPUs that multiply bfloat16."""
