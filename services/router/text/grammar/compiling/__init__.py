"""Compiles grammars outside the router's own process: what compiles them may crash, take seconds or fill memory.

`checker` asks, `process` answers. docs/adr/0015-grammar-compilation.md has the reasons.
"""
