"""One persistent Triton kernel for all layers of a single token over four-bit weights."""
