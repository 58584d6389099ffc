"""The memory of the KV cache, its capacity, and the memory of its host tier."""
