"""Compiles grammars in another process than the router's, because a compiler may crash, take seconds or exhaust memory.

`checker` runs in the router and sends grammars; `limited_compiler` is the other process. The reasons are in
docs/adr/0015-grammar-compilation.md.
"""
