"""Attention kernels: PyTorch's own, one in C++ for CPUs, and one in Triton for GPUs."""
