"""The forward pass: attention, fused layers, adapters and vision towers."""
