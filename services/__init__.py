"""Baton's processes: router, prefill, decode, unified, encode, and `baton serve`, which starts all on one machine."""
