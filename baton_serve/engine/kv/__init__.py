"""The memory of the KV cache and its tier in host memory."""
