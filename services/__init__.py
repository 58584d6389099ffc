"""Baton's processes: router, prefill, decode, unified, and `baton serve`, which starts them all on one machine."""
