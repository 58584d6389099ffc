"""The process of a unified instance: computes prompts and generates answers."""
