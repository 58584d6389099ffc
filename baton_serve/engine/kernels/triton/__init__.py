"""Triton kernels for accelerators. Each has a plain-torch twin in `kernels/reference`."""
