"""Low-rank adapters (LoRA) in PEFT's format: read and checked, kept beside the model, added to its products.

Modules: `checkpoint` (a folder to matrices), `store` (which are loaded), `products` (what they add to a step).
"""
