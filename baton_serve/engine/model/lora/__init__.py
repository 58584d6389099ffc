"""LoRA adapters in PEFT's format: reading, keeping them beside the model, and adding their products.

Modules: `adapter_files` (a folder to matrices), `store` (which adapters are loaded), `products` (what they add in a
step), `loaded_adapters` (the interface of the engine).
"""
