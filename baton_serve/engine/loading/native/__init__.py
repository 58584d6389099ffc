"""Loads dense decoders without transformers, whose import takes longer than the rest of the start.

Only folders that are fully understood are loaded here. All others are left to transformers.
"""
