"""Steps on GPUs by graphs of all their kernels. The modules here are imported on a GPU only."""
